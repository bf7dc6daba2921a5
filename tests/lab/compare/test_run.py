"""Two engines on a tiny model: honest ones are equivalent, planted faults are different."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ab_faults import FourBits, Hot, Swapped
from engines import NO_NATIVE, engine_on
from models import save

from turnout.core import Sampling
from turnout.lab.compare.run import Settings, compare
from turnout.lab.compare.sides import EngineSide, Item, SideError
from turnout.lab.compare.verdict import Verdict
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.quant.none import Unquantized

SETTINGS = Settings(max_tokens=12, num_top=10)
WINDOW, BLOCK, FAR = 24, 16, Swapped.beyond


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("mistral", tmp_path_factory.mktemp("mistral"), sliding_window=WINDOW)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(inspect(str(folder), "float32", "cpu"), Unquantized())


@pytest.fixture(scope="module")
def items() -> list[Item]:
    dice = random.Random(0)
    lengths = [dice.randrange(4, 60) for _ in range(14)] + [dice.randrange(FAR + 20, 120) for _ in range(10)]
    return [Item(str(i), tuple(dice.randrange(5, 120) for _ in range(n))) for i, n in enumerate(lengths)]


def side(model: Model, attention: str = "torch") -> EngineSide:
    return EngineSide(attention, engine_on(model, attention=attention, num_blocks=400, block_size=BLOCK))


def test_an_engine_is_equivalent_to_itself(model: Model, items: list[Item]) -> None:
    [found] = compare(side(model), [side(model)], items, SETTINGS)
    assert found.verdict is Verdict.EQUIVALENT
    assert not found.table.flip.any() and not [d for d in found.divergences if d.position is not None]
    assert {finding.measure for finding in found.findings} == {"kl", "flips", "greedy", "sampled", "surprise"}


@pytest.mark.skipif(NO_NATIVE is not None, reason=f"no kernels: {NO_NATIVE}")
def test_backends_that_compute_the_same_are_equivalent(model: Model, items: list[Item]) -> None:
    [found] = compare(side(model), [side(model, "cpu")], items, SETTINGS)
    assert found.verdict is Verdict.EQUIVALENT
    assert 0 < found.table.kl.max() < 1e-7


@pytest.mark.parametrize("fault", ["scaled", "wider window", "swapped", "dropped"])
def test_a_planted_fault_is_different(model: Model, items: list[Item], fault: str) -> None:
    [found] = compare(side(model), [side(model, fault)], items, SETTINGS)
    assert found.verdict is Verdict.DIFFERENT


def test_a_zero_point_off_by_one_in_one_layer_is_different(folder: Path, items: list[Item]) -> None:
    right, wrong = (
        load(inspect(str(folder), "float32", "cpu"), FourBits(name)) for name in ("", "model.layers.1.self_attn.v_proj")
    )
    [same, found] = compare(side(right), [side(right), side(wrong)], items, SETTINGS)
    assert (same.verdict, found.verdict) == (Verdict.EQUIVALENT, Verdict.DIFFERENT)


def test_a_fault_of_long_contexts_is_found_there_and_nowhere_else(model: Model, items: list[Item]) -> None:
    [found] = compare(side(model), [side(model, "swapped")], items, SETTINGS)
    kl = {f.bucket: f.verdict for f in found.findings if f.measure == "kl"}
    assert kl["0-63"] is Verdict.EQUIVALENT and kl["64-255"] is Verdict.DIFFERENT


def test_a_temperature_silently_replaced_shows_in_free_writing_alone(model: Model, items: list[Item]) -> None:
    hot = Hot("hot", engine_on(model, num_blocks=400))
    [found] = compare(side(model), [hot], items, SETTINGS)
    assert found.verdict is Verdict.DIFFERENT
    assert {f.measure for f in found.findings if f.verdict is Verdict.DIFFERENT} >= {"sampled", "surprise"}
    assert {f.bucket for f in found.findings if f.measure == "surprise" and f.mean > 0} == {"hotter"}
    assert not found.table.flip.any()


def test_one_baseline_serves_several_comparisons(model: Model, items: list[Item]) -> None:
    found = compare(side(model), [side(model), side(model, "scaled")], items, SETTINGS)
    assert [c.verdict for c in found] == [Verdict.EQUIVALENT, Verdict.DIFFERENT]


def test_few_prompts_are_not_enough_data(model: Model, items: list[Item]) -> None:
    [found] = compare(side(model), [side(model)], items[:3], SETTINGS)
    assert found.verdict is Verdict.NOT_ENOUGH_DATA
    assert all(finding.needed for finding in found.findings)


def test_answers_are_checked_where_there_is_something_to_check(model: Model, items: list[Item]) -> None:
    def decode(tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    first = side(model).write(items[:1], {"0": Sampling(0.0, max_tokens=12)}, 1)["0"]
    asked = [replace(items[0], answer=decode(first.tokens[2:4])), replace(items[1], answer="never"), *items[2:]]
    [found] = compare(side(model), [side(model)], asked, SETTINGS, decode)
    assert found.answers == {"0": (True, True), "1": (False, False)}


def test_no_prompts_and_prompts_too_long_are_said(model: Model) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        compare(side(model), [side(model)], [], SETTINGS)
    with pytest.raises(SideError, match="torch refused a request: the prompt has 500 tokens"):
        compare(side(model), [side(model)], [Item("long", (5,) * 500)], SETTINGS)
