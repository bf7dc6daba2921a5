"""How long a step takes: laws found again, rooflines by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from simulations import arrival, simulation

from turnout.compose.config import Limits
from turnout.core.types import Chunk, Request
from turnout.lab.simulate.analytic import Analytic
from turnout.lab.simulate.hardware import HARDWARE, MODELS, measured_cpu, model_of
from turnout.lab.simulate.latency import Constant, Fitted, features, fit, nonnegative
from turnout.lab.simulate.loop import info_of
from turnout.lab.workload.recorded import steps
from turnout.lab.workload.work import Work, work_of
from turnout.plugins.blocks import PagedBlocks


def test_the_work_of_a_step_is_counted_by_hand() -> None:
    somebody = Request("r", [1])
    chunks = [Chunk(somebody, 10, 3, True), Chunk(somebody, 7, 1, True), Chunk(somebody, 0, 2, False)]
    # prefill: tokens at 10, 11, 12 see 11 + 12 + 13 keys, tokens at 0 and 1 see 1 + 2; a decode at 7 sees 8
    assert work_of(chunks, 5, 6) == Work(5, 39, 15, 1, 8, 2, 5, 6)


LAW = np.array([4e-3, 2e-4, 3e-8, 5e-5, 1e-7, 0.0, 2e-3])


def works(count: int) -> list[Work]:
    dice = np.random.default_rng(0)
    found = []
    for _ in range(count):
        chunks = [Chunk(Request("r", [1]), int(dice.integers(2000)), 1, True) for _ in range(int(dice.integers(40)))]
        if dice.random() < 0.4:
            chunks.append(Chunk(Request("r", [1]), int(dice.integers(2000)), int(dice.integers(2, 500)), True))
        found.append(work_of(chunks, int(dice.integers(3))))
    return found


def test_a_planted_law_is_found_again_under_noise_and_its_error_is_that_of_the_noise() -> None:
    rows = np.array([features(work) for work in works(2000)])
    noise = np.random.default_rng(1).normal(1.0, 0.05, len(rows))
    found = fit(rows, rows @ LAW * noise)
    assert found.weights[:2] == pytest.approx(LAW[:2], rel=0.05)
    assert found.weights[3] + found.weights[5] == pytest.approx(LAW[3], rel=0.15)  # a decode samples a token
    assert found.weights[6] == pytest.approx(LAW[6], rel=0.05)
    assert 0.025 < found.median_error < 0.045  # 0.674 sigma
    assert 0.07 < found.p90_error < 0.10  # 1.645 sigma


def test_no_weight_is_negative_even_where_the_best_line_would_be() -> None:
    a = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert nonnegative(a, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert nonnegative(a, np.array([1.0, 2.0, 3.0])) == pytest.approx([1.0, 1.0])
    assert nonnegative(a, np.array([-1.0, -1.0, -1.0])) == pytest.approx([0.0, 0.0])


def log(path: Path, count: int = 400) -> Path:
    """A recording whose steps follow LAW."""
    info = dict.fromkeys(("model", "path", "architecture", "dtype", "device"), "") | {"plugins": {}, "versions": {}}
    info |= dict.fromkeys(("vocab_size", "max_model_len", "num_blocks", "block_size", "capacity"), 100)
    info |= {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    now, dice, somebody = 0.0, np.random.default_rng(2), Request("r", [1])
    lines: list[dict[str, object]] = [{"turnout": 1, "info": info, "composition": {}, "fingerprint": "fp_"}]
    rest = {"preempted": [], "copies": 0, "tokens": [], "reasons": {}, "blocks_free": 9, "finished": [], "waiting": 0}
    for number in range(count):
        chunks = [[f"r{i}", int(dice.integers(2000)), 1, False] for i in range(int(dice.integers(1, 20)))]
        chunks += [["long", int(dice.integers(500)), int(dice.integers(2, 300)), False]] if number % 3 == 0 else []
        work = work_of([Chunk(somebody, c[1], c[2], c[3]) for c in chunks], number % 2)  # type: ignore[arg-type]
        began, now = now, now + float(np.array(features(work)) @ LAW)
        between = {"began": began, "scheduled": began, "ended": now - 1e-3}  # the rest passes between two steps
        running = 0 if number % 50 == 49 else 1
        moved = {"swap_out": number % 2, "swap_in": 0, "running": running}
        lines.append({"step": number, "chunks": chunks} | between | rest | moved)
        if not running:
            lines[-1]["ended"], now = now, now + 60.0  # nothing to do for a minute: no step's time
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_fit_to_a_recording_predicts_its_steps_with_what_lies_between_them(tmp_path: Path) -> None:
    latency = Fitted(str(log(tmp_path / "log")))
    latency.start(16)
    for work, seconds in zip(*steps(latency.log), strict=True):
        assert latency.seconds(work) == pytest.approx(seconds, rel=1e-3)
    assert "held out, the error is 0.0% in the median, 0.0% at p90" in " ".join(latency.assumptions())


def test_a_log_that_is_missing_or_too_short_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="latency.log is empty"):
        Fitted().start(16)
    with pytest.raises(ValueError, match="has 10 steps that computed something; 50 are needed"):
        Fitted(str(log(tmp_path / "log", 10))).start(16)


def test_parameter_counts_are_those_of_the_model_cards() -> None:
    millions = {name: round(shape.num_parameters / 1e6) for name, shape in MODELS.items()}
    assert millions == {"llama-3-70b": 70552, "llama-3-8b": 8030, "smollm2-135m": 134}  # norms left out


def roofline(**options: object) -> Analytic:
    ideal = {"bandwidth_share": 1.0, "flops_share": 1.0, "overhead": 0.0}
    latency = Analytic("h100", "llama-3-8b", **(ideal | options))  # type: ignore[arg-type]
    latency.start(16)
    return latency


def test_a_decode_alone_takes_as_long_as_reading_the_weights_and_its_cache() -> None:
    weights = (8.03e9 - 128256 * 4096) * 2  # without the input embedding
    cache = 1000 * 128 * 1024  # 8 key/value heads of 128, keys and values, 32 layers, 2 bytes: 128 KiB a token
    seconds = roofline().seconds(Work(decodes=1, decode_keys=1000, samples=1))
    assert seconds == pytest.approx((weights + cache) / 3.35e12, rel=1e-3)


def test_a_long_prompt_takes_as_long_as_computing_it() -> None:
    tokens, pairs = 8192, 8192 * 8193 // 2
    operations = 2 * tokens * (8.03e9 - 2 * 128256 * 4096) + 2 * 128256 * 4096 + 4 * pairs * 32 * 4096
    seconds = roofline().seconds(Work(tokens, pairs, 8192, samples=1))
    assert seconds == pytest.approx(operations / 989e12, rel=1e-3)


def test_tensor_parallel_divides_the_work_and_adds_two_all_reduces_a_layer() -> None:
    work = Work(decodes=64, decode_keys=64_000, samples=64)
    alone, four = roofline().seconds(work), roofline(tensor_parallel=4).seconds(work)
    exchanged = 64 * 4096 * 2 * 2 * 3 / 4 / 450e9  # bytes of an activation go round twice
    assert four == pytest.approx(alone / 4 + 64 * (10e-6 + exchanged), rel=1e-6)


def test_swapped_blocks_cross_the_host_link() -> None:
    none, some = (roofline().seconds(Work(decodes=1, samples=1, moved_blocks=n)) for n in (0, 10))
    assert some - none == pytest.approx(10 * 16 * 131072 / 64e9)


def test_seventy_billion_parameters_on_four_devices_leave_room_for_a_cache() -> None:
    latency = Analytic("h200", "llama-3-70b", tensor_parallel=4)
    latency.start(16)
    num_blocks, note = latency.blocks(16, 0.9, 0.3)
    room = 4 * 141e9 * 0.9 - 70.55e9 * 2
    assert num_blocks == pytest.approx(room / (16 * 80 * 2 * 8 * 128 * 2), rel=1e-3)
    assert "366.5 GB" in note
    with pytest.raises(ValueError, match="leaves no room for a key/value cache; raise latency.tensor_parallel"):
        alone = Analytic("h200", "llama-3-70b")
        alone.start(16)
        alone.blocks(16, 0.9, 0.3)


def test_the_assumptions_say_every_number() -> None:
    latency = Analytic("a100", "llama-3-8b", tensor_parallel=2, kv_bytes=1.0)
    latency.start(16)
    said = " ".join(latency.assumptions())
    for number in ("2.04 TB/s", "312 TFLOP/s", "80 GB each", "80%", "60%", "8.03 billion", "64 KiB", "300 GB/s"):
        assert number in said


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    config |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert model_of(str(tmp_path)) == MODELS["smollm2-135m"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))
    with pytest.raises(ValueError, match="has num_local_experts: only dense models are described"):
        model_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks num_hidden_layers, hidden_size"):
        model_of(str(tmp_path))


def test_this_machine_is_measured() -> None:
    cpu = measured_cpu()
    assert 1e8 < cpu.bandwidth < 1e13
    assert 1e8 < cpu.flops < 1e14
    assert cpu.memory > 1e8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hardware": "b900"},
            "latency.hardware=b900: there is no such description; there are h200, h100, a100 and cpu",
        ),
        ({"model": "gpt-9"}, r"latency.model=gpt-9: neither a description \(llama-3-70b, .*\) nor a folder"),
        ({"tensor_parallel": 3}, "latency.tensor_parallel must divide the 8 key/value heads of llama-3-8b: 3"),
        ({"flops_share": 1.5}, "latency.flops_share must be at most 1, got 1.5"),
        ({"bandwidth": 0.0}, "latency.bandwidth must be above 0, got 0.0"),
    ],
)
def test_a_wrong_description_is_an_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Analytic(**options).start(16)  # type: ignore[arg-type]


def test_without_a_description_the_number_of_blocks_must_be_given() -> None:
    with pytest.raises(ValueError, match="blocks.num_blocks is null, .* set it to what"):
        simulation(arrival(0.0, 1, 1), blocks=PagedBlocks(16))
    run = simulation(arrival(0.0, 1, 1), blocks=PagedBlocks(16), latency=Analytic(), limits=Limits(max_num_seqs=2))
    assert info_of(run.config).num_blocks == 2 * 131072 // 16  # no more than the seats could ever fill
    with pytest.raises(ValueError, match="limits.max_model_len is 200000, but llama-3-8b was made for 131072"):
        simulation(arrival(0.0, 1, 1), latency=Analytic(), limits=Limits(max_model_len=200_000))


def test_every_device_says_what_it_is() -> None:
    assert {device.title for device in HARDWARE.values()} == {
        "NVIDIA H200 SXM",
        "NVIDIA H100 SXM",
        "NVIDIA A100 SXM 80 GB",
    }
    assert Constant(0.5).seconds(Work()) == 0.5
