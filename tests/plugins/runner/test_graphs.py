"""Decode steps recorded and replayed, proven on a tape: the tokens are those of eager steps, padding touches nobody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engines import engine_on, words
from interpreting import NO_INTERPRETER
from models import VOCAB, save
from tape import Forgetful, Refreshing, Tape

from turnout.core import KVSpec, ModelError, Request, Sampling
from turnout.core.engine import Engine
from turnout.core.model import Limits
from turnout.plugins.attention.torch_sdpa import TorchAttention
from turnout.plugins.attention.triton import TritonAttention
from turnout.plugins.loader import model as loading
from turnout.plugins.loader.model import Model
from turnout.plugins.preemption import Swap
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.runner import LocalRunner
from turnout.plugins.runner.graphs import Recorder, sizes

LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=64)
BLOCKS = 24
CPU = torch.device("cpu")


@dataclass
class Taped(LocalRunner):
    mode: str = "graphs"

    recorder: ClassVar[type[Recorder]] = Tape


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Without native kernels: no tape sees what they do."""
    folder = save(request.param, tmp_path_factory.mktemp("tiny"))
    return loading.load(replace(loading.inspect(str(folder), "float32", "cpu"), traced=True), Unquantized())


def started(model: Model, runner: LocalRunner, backend: Any) -> Engine:
    """An engine on `runner`, with swap: blocks leave and come back between replays."""
    engine = engine_on(
        model,
        num_blocks=BLOCKS,
        block_size=4,
        preemption=Swap(host_blocks=8),
        max_num_seqs=6,
        max_num_batched_tokens=64,
    )
    runner.prepare(model.info, LIMITS, lambda stage, share: None)
    runner.start(model, backend, KVSpec(model.info.layers, 4, BLOCKS), torch.float32, CPU, 8)
    engine._runner = runner
    return engine


def traffic() -> list[Request]:
    """Requests of many lengths: more than run at once, more than fit, ending at different times."""
    return [
        Request(
            f"r{i}",
            words(2 + 7 * i % 19, i, VOCAB),
            Sampling(temperature=(i % 3) / 2, seed=i, max_tokens=3 + 5 * i % 23, logprobs=1 if i == 4 else None),
        )
        for i in range(12)
    ]


def tokens_of(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in engine.generate(traffic()):
        assert output.error is None
        found.setdefault(output.request_id, []).extend(output.tokens)
    return found


def test_tokens_are_those_of_eager_steps_while_requests_join_finish_and_are_swapped(model: Model) -> None:
    eager = started(model, LocalRunner(), Refreshing())
    expected = tokens_of(eager)
    runner = Taped()
    engine = started(model, runner, Refreshing())
    played = {size: 0 for size in sizes(6)}
    for size, recorded in runner._forward._recorded.items():  # type: ignore[attr-defined]

        def counted(size: int = size, replay: Any = recorded.replay) -> None:
            played[size] += 1
            replay()

        runner._forward._recorded[size] = recorded._replace(replay=counted)  # type: ignore[attr-defined]
    assert tokens_of(engine) == expected
    assert all(played.values()), f"every size is replayed, and none was left to eager steps: {played}"
    assert engine.stats.preemptions_swap and engine.stats.num_steps < 2 * sum(played.values())


def test_a_plan_that_is_not_refreshed_gives_other_tokens(model: Model) -> None:
    """So this file would notice."""
    assert tokens_of(started(model, Taped(), Forgetful())) != tokens_of(started(model, LocalRunner(), Forgetful()))


def test_padding_is_written_to_the_spare_block_alone(model: Model) -> None:
    engine = started(model, runner := Taped(), Refreshing())
    asked = [Request(f"r{i}", words(5, i, VOCAB), Sampling(temperature=0, max_tokens=8)) for i in range(3)]
    for request in asked:
        engine.add(request)
    engine.step()
    marked = [tensor.fill_(7.0) for tensor in runner._layers.tensors()]
    engine.step()  # three decodes, recorded for four
    held = {request.blocks[request.num_computed // 4] for request in asked}
    for tensor in marked:
        changed = (tensor != 7.0).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert set(changed) <= held | {BLOCKS} and BLOCKS in changed


def test_the_sizes_are_few_and_end_with_the_largest_step() -> None:
    assert sizes(1) == [1]
    assert sizes(6) == [1, 2, 4, 6]
    assert sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert sizes(300)[-3:] == [256, 288, 300]


def test_recording_is_told_of_and_begins_with_the_largest(model: Model) -> None:
    told: list[tuple[str, float]] = []
    runner = Taped()
    runner.prepare(model.info, LIMITS, lambda *heard: told.append(heard))
    runner.start(model, Refreshing(), KVSpec(model.info.layers, 4, BLOCKS), torch.float32, CPU, 0)
    assert told == [("recording decode steps", n / 4) for n in range(4)]
    assert list(runner._forward._recorded) == [6, 4, 2, 1]  # type: ignore[attr-defined]


def test_a_backend_that_cannot_refresh_or_asks_the_device_is_refused(model: Model) -> None:
    class Asking(Refreshing):
        def run(self, *args: Any) -> torch.Tensor:
            out = super().run(*args)
            return out if float(out.sum()) else out + 1

    for backend, why in ((TorchAttention(), "TorchAttention has no `refresh`"), (Asking(), "waits for the device")):
        with pytest.raises(ModelError, match=f"runner.mode=graphs .*{why}.*choose another attention"):
            started(model, Taped(), backend)


@dataclass
class Again:
    """A recorder for kernels that no tape sees: what was recorded is called again, on the plans and buffers it had."""

    device: ClassVar[str] = "cpu"

    def __init__(self, device: torch.device) -> None: ...

    def record(self, compute: Any) -> Any:
        compute()
        return torch.inference_mode()(compute)


@dataclass
class CalledAgain(Taped):
    recorder: ClassVar[type[Recorder]] = Again


@pytest.mark.slow
@pytest.mark.skipif(NO_INTERPRETER is not None, reason=f"{NO_INTERPRETER}")
def test_our_triton_kernels_read_the_buffers_they_were_recorded_with(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, num_hidden_layers=1)
    model = loading.load(replace(loading.inspect(str(folder), "float32", "cpu"), traced=True), Unquantized())
    found = []
    for runner, backend in ((LocalRunner(), TorchAttention()), (CalledAgain(), TritonAttention())):
        engine = started(model, runner, backend)
        asked = [Request(f"r{i}", words(2 + 3 * i, i, VOCAB), Sampling(0, max_tokens=3 + i)) for i in range(3)]
        outputs = list(engine.generate(asked))
        found.append({rid: [t for o in outputs if o.request_id == rid for t in o.tokens] for rid in ("r0", "r1", "r2")})
    assert found[0] == found[1]
