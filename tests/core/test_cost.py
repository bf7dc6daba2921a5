"""The estimate of step cost learns the law that steps follow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from virtual import plus

from turnout.core.cost import CostModel, Load

LAW = (4e-3, 4e-4, 1e-8, 5e-4, 2e-8, 2e-4)


def lasts(load: Load, law: Sequence[float] = LAW) -> float:
    return sum(seconds * count for seconds, count in zip(law, (1, *load), strict=True))


def some_load(dice: random.Random) -> Load:
    load = Load(moved_blocks=dice.choice([0, 0, 0, dice.randrange(50)]))
    for _ in range(dice.randrange(1, 20)):
        load = plus(load, dice.randrange(4000), dice.choice([1, 1, 1, dice.randrange(1, 300)]))
    return load


@pytest.fixture
def learned() -> CostModel:
    dice, cost = random.Random(0), CostModel()
    for _ in range(400):
        load = some_load(dice)
        cost.observe(load, lasts(load))
    return cost


def test_after_some_steps_it_is_the_law_they_follow(learned: CostModel) -> None:
    dice = random.Random(1)
    for _ in range(50):
        load = some_load(dice)
        assert learned.estimate.seconds(load) == pytest.approx(lasts(load), rel=0.01)
    assert learned.estimate.recompute(1000) == pytest.approx(LAW[1] * 1000 + LAW[2] * 500_500, rel=0.02)
    assert learned.estimate.swap(30) == pytest.approx(2 * 30 * LAW[5], rel=0.02)


def test_what_fits_is_all_that_fits(learned: CostModel) -> None:
    load = plus(plus(Load(), 100, 1), 200, 1)
    for start in (0, 3000):
        count = learned.estimate.fits(load, start, 0.05)
        assert (
            learned.estimate.seconds(plus(load, start, count))
            <= 0.05
            < learned.estimate.seconds(plus(load, start, count + 1))
        )
    assert learned.estimate.fits(load, 0, 0.004) == 0


def test_the_same_steps_in_the_same_order_give_the_same_estimates() -> None:
    def weights() -> tuple[float, ...]:
        dice, cost = random.Random(3), CostModel()
        for _ in range(30):
            load = some_load(dice)
            cost.observe(load, lasts(load) * dice.uniform(0.8, 1.3))
        return cost.estimate.weights

    assert weights() == weights()


def test_steps_that_took_longer_than_they_were_made_to_fit_leave_less_room_for_later_ones(learned: CostModel) -> None:
    load = plus(Load(), 100, 1)
    calm = learned.estimate.fits(load, 0, 0.05)
    for _ in range(30):
        full = plus(load, 0, learned.estimate.fits(load, 0, 0.05))
        learned.observe(full, lasts(full) * 1.2, fitted=True)
        learned.observe(full, lasts(full) * 0.9, fitted=True)
    assert lasts(plus(load, 0, learned.estimate.fits(load, 0, 0.05))) * 1.2 < 0.05 < lasts(plus(load, 0, calm)) * 1.2


def test_a_step_that_took_no_time_teaches_nothing() -> None:
    cost = CostModel()
    before = cost.estimate
    cost.observe(Load(10, 55), 0.0)
    cost.observe(Load(10, 55), float("nan"))
    assert cost.estimate == before and before.num_seen == 0


def test_a_step_hangs_only_after_many_times_what_is_expected_or_what_its_tokens_take_one_by_one() -> None:
    cost = CostModel()
    for _ in range(50):
        cost.observe(plus(Load(), 10, 1), 1.6)  # a slow machine that has never seen a prompt
    assert cost.estimate.bound(plus(Load(), 10, 1)) == pytest.approx(20 * 1.6, rel=0.05)
    assert cost.estimate.bound(plus(Load(), 0, 2048)) > 3000
