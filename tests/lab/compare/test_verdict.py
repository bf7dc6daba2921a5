"""The verdict's error rates, measured: how often it is wrong, and that it says when it can't know."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from turnout.lab.compare.verdict import Judging, Verdict, far_apart, judge

EFFECTS = {"kl": 1e-3}


def verdict(values: NDArray[np.float64], **judging: float) -> Verdict:
    return judge({("kl", "all"): values}, EFFECTS, Judging(**judging))[0]


def runs(mean: float, spread: float, num: int = 16, repeats: int = 400) -> list[Verdict]:
    dice = np.random.default_rng(0)
    return [verdict(dice.normal(mean, spread, num)) for _ in range(repeats)]


def test_no_excess_is_equivalent_nearly_always() -> None:
    assert runs(0.0, 2e-4).count(Verdict.EQUIVALENT) >= 396


def test_a_large_excess_is_different_nearly_always() -> None:
    assert runs(5e-3, 1e-3).count(Verdict.DIFFERENT) >= 396


def test_an_excess_at_the_effect_itself_is_seldom_called_different() -> None:
    assert runs(1e-3, 1e-3, repeats=2000).count(Verdict.DIFFERENT) <= 40  # alpha = 1 %, and room for chance


def test_an_excess_at_the_effect_itself_is_seldom_called_equivalent() -> None:
    assert runs(1e-3, 1e-3, repeats=2000).count(Verdict.EQUIVALENT) <= 40


def test_noise_larger_than_the_effect_is_not_enough_data_and_the_number_asked_for_settles_it() -> None:
    dice = np.random.default_rng(1)
    values = dice.normal(0.0, 5e-3, 16)
    result, [finding] = judge({("kl", "all"): values}, EFFECTS, Judging())
    assert result is Verdict.NOT_ENOUGH_DATA and finding.needed is not None and finding.needed > 16
    num = finding.needed
    assert sum(verdict(dice.normal(0.0, 5e-3, num)) is Verdict.EQUIVALENT for _ in range(200)) >= 160


@pytest.mark.parametrize("num", [0, 1, 2, 4])
def test_too_few_prompts_are_never_a_verdict(num: int) -> None:
    values = np.full(num, 1.0)
    assert num == 0 or verdict(values) is Verdict.NOT_ENOUGH_DATA
    assert judge({}, EFFECTS, Judging())[0] is Verdict.NOT_ENOUGH_DATA


@pytest.mark.parametrize(("num", "expected"), [(20, Verdict.NOT_ENOUGH_DATA), (21, Verdict.EQUIVALENT)])
def test_that_none_of_a_few_writings_parts_is_no_proof_that_few_do(num: int, expected: Verdict) -> None:
    """With 20 of 100 parting, 21 prompts show none of them once in a hundred times."""
    result, [finding] = judge({("greedy", "all"): np.zeros(num)}, {"greedy": 0.2}, Judging())
    assert result is expected and finding.needed == (21 if expected is Verdict.NOT_ENOUGH_DATA else None)


def test_one_different_measure_among_equivalent_ones_decides() -> None:
    dice = np.random.default_rng(2)
    excess = {("kl", str(i)): dice.normal(0.0, 1e-5, 20) for i in range(5)} | {("kl", "far"): np.full(20, 0.1)}
    result, findings = judge(excess, EFFECTS, Judging())
    assert result is Verdict.DIFFERENT
    assert [f.verdict is Verdict.DIFFERENT for f in findings] == [False] * 5 + [True]


def test_a_fault_in_a_part_of_heavy_tailed_prompts_is_found_by_their_signs() -> None:
    """The mean of such values is no good witness; that nearly all lie above the effect is."""
    values = np.exp(np.random.default_rng(3).normal(0.0, 4.0, 24)) * 0.05
    assert verdict(values) is Verdict.DIFFERENT


@pytest.mark.parametrize(("name", "value"), [("alpha", 0.0), ("alpha", 1.0), ("power", 1.5)])
def test_impossible_error_rates_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"judge.{name}"):
        Judging(**{name: value})


def test_a_large_difference_in_a_few_prompts_is_found_whatever_its_spread() -> None:
    """The rest is the same to the last bit, so that neither a mean with its spread nor a majority shows it."""
    values = np.zeros(24)
    values[:6] = [5.0, 0.5, 0.1, 0.05, 0.03, 0.02]
    assert judge({("kl", "all"): values}, {"kl": 1e-6}, Judging())[0] is Verdict.DIFFERENT


def test_the_bound_by_order_keeps_its_error_rate_for_rare_large_values() -> None:
    dice = np.random.default_rng(2)
    rare = [np.where(dice.random(24) < 0.02, 0.05, 0.0) for _ in range(2000)]  # their mean is the effect itself
    assert sum(verdict(values) is Verdict.DIFFERENT for values in rare) <= 40


@pytest.mark.parametrize(
    ("excess", "noise", "different"),
    [(0.058, 1e-11, True), (0.058, 0.0, True), (0.058, 1e-6, False), (5e-5, 1e-12, False)],
)
def test_one_prompt_beyond_all_noise_is_different(excess: float, noise: float, different: bool) -> None:
    found = far_apart(np.array([excess]), np.array([noise]), 1e-6)
    assert (found is not None) is different
    if found is not None:
        assert found.verdict is Verdict.DIFFERENT and found.num_prompts == 1 and found.mean == excess
