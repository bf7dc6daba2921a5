"""What must say the same says the same: every scheduler, preemption, block manager and attention backend that runs here."""

from __future__ import annotations

import random

import pytest
from bytewise import save_model

from turnout.compose import plugins
from turnout.lab import assert_equivalent, open_engine
from turnout.lab.compare.sides import EngineSide
from turnout.testing.pytest_plugin import choices, pytest_generate_tests

__all__ = ["pytest_generate_tests"]  # for pytest
WINDOW = 24
SMALL = {"max_tokens": 6, "num_top": 10}
TIGHT = ["blocks.num_blocks=9", "blocks.prefix_cache=false"]  # of 16 tokens: two prompts at once, then room is short


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_model(tmp_path_factory.mktemp("tiny") / "tiny", "mistral", sliding_window=WINDOW)
    return f"model={folder}"


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    dice = random.Random(0)
    return [[dice.randrange(5, 250) for _ in range(dice.randrange(4, 60))] for _ in range(21)]


@pytest.fixture(scope="module")
def plain(model: str) -> EngineSide:
    """The baseline: nothing is short, nothing is native."""
    return EngineSide("the baseline", open_engine([model, "attention=torch", "blocks.num_blocks=400"]))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inside torch's compiler
def test_every_attention_backend(model: str, plain: EngineSide, prompts: list[list[int]], each_attention: str) -> None:
    assert_equivalent(plain, [model, each_attention], prompts, **SMALL)


def test_every_scheduler_with_steps_too_small_for_a_prompt(
    model: str, plain: EngineSide, prompts: list[list[int]], each_scheduler: str
) -> None:
    small = ["limits.max_num_batched_tokens=24", "limits.max_num_seqs=5"]
    assert_equivalent(plain, [model, "attention=torch", each_scheduler, *small], prompts, **SMALL)


def test_every_preemption_where_room_is_short(
    model: str, plain: EngineSide, prompts: list[list[int]], each_preemption: str
) -> None:
    engine = open_engine([model, "attention=torch", each_preemption, *TIGHT])
    assert_equivalent(plain, engine, prompts, **SMALL)
    assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap > 0


def test_every_block_manager_that_has_seen_the_prompts_before(
    model: str, plain: EngineSide, prompts: list[list[int]], each_blocks: str
) -> None:
    engine = open_engine([model, "attention=torch", each_blocks, "blocks.num_blocks=400", "blocks.block_size=8"])
    alike = [[*prompts[0][:20], *prompt] for prompt in prompts]
    assert_equivalent(plain, engine, alike, **SMALL)
    assert engine.stats.cached_tokens > 0


def test_a_coarser_dtype_within_stated_bounds(model: str, plain: EngineSide, prompts: list[list[int]]) -> None:
    bounds = {"kl": 1e-2, "flips": 0.1, "greedy": 0.9, "surprise": 1.5}
    found = assert_equivalent(plain, [model, "dtype=bfloat16"], prompts, effects=bounds, **SMALL)
    assert found.table.kl.mean() > 1e-7, "it is no float32"


def test_every_quantizer_of_float_weights_within_stated_bounds(
    model: str, plain: EngineSide, prompts: list[list[int]], each_quant: str
) -> None:
    formats = plugins.load().get("quant", each_quant.removeprefix("quant=")).component.checkpoint_formats  # type: ignore[attr-defined]
    if formats:
        pytest.skip(f"{each_quant} reads checkpoints of {', '.join(sorted(formats))} only")
    bounds = {"kl": 0.5, "flips": 0.5, "greedy": 1.01, "sampled": 1.01, "surprise": 3.0}
    assert_equivalent(plain, [model, "attention=torch", each_quant], prompts, effects=bounds, **SMALL)


def test_what_is_not_the_same_fails_with_the_reasons_in_words(
    model: str, plain: EngineSide, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = save_model(tmp_path_factory.mktemp("other") / "other", "mistral", sliding_window=WINDOW + 1)
    with pytest.raises(AssertionError) as error:
        assert_equivalent(plain, [f"model={other}", "attention=torch"], prompts, **SMALL)
    first, *reasons = str(error.value).splitlines()
    assert first.startswith("the baseline and model=") and first.endswith(": different")
    assert any("above A's own noise" in reason and "matters" in reason for reason in reasons)
    with pytest.raises(AssertionError, match="(?s)not enough data.*num_prompts=21") as few:
        assert_equivalent(plain, plain, prompts, num_prompts=8, **SMALL)
    assert "8 prompts can't show" in str(few.value)


def test_a_workload_by_name_is_cut_by_the_sides_own_tokenizer(model: str) -> None:
    found = assert_equivalent([model], [model, "scheduler=chunked_prefill"], "short", num_prompts=21, **SMALL)
    assert min(found.lengths) == 8 and max(found.lengths) == 128


def test_settings_that_do_not_exist_are_named(plain: EngineSide) -> None:
    with pytest.raises(TypeError, match="got near_ties"):
        assert_equivalent(plain, plain, [[5]], near_ties=1.0)


def test_choices_are_all_that_is_installed_and_none_that_stands_for_another() -> None:
    assert {"cpu", "torch"} <= {parameter.id for parameter in choices("attention")}  # type: ignore[attr-defined]
    assert "auto" not in {parameter.id for parameter in choices("attention")}  # type: ignore[attr-defined]
    assert {"recompute", "swap"} <= {parameter.id for parameter in choices("preemption")}  # type: ignore[attr-defined]
