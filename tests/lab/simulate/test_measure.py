"""Distributions, time lines and fairness, in bounded memory."""

from __future__ import annotations

import itertools
import random

import pytest

from turnout.core.types import Chunk, Request, Step
from turnout.lab.simulate.fairness import Fairness, jain
from turnout.lab.simulate.measure import EXACT, POINTS, Spread, Timeline


def test_percentiles_are_exact_by_nearest_rank() -> None:
    spread = Spread(bound=0.0895)
    for number in range(100, 0, -1):
        spread.add(number / 1000)
    assert spread.summary() == {"mean": 0.0505, "p50": 0.05, "p90": 0.09, "p95": 0.095, "p99": 0.099, "max": 0.1}
    assert spread.quantiles([0.001, 1.0]) == [0.001, 0.1]
    assert spread.over == 11


def test_many_equal_values_are_added_at_once() -> None:
    spread = Spread()
    spread.add(1.0, 99)
    spread.add(5.0)
    assert (spread.count, spread.mean, spread.quantile(0.99), spread.most) == (100, 1.04, 1.0, 5.0)


def test_nothing_has_no_percentiles() -> None:
    assert set(Spread().summary().values()) == {0.0}


def test_beyond_a_bound_values_fall_into_buckets_of_one_percent() -> None:
    dice, spread, values = random.Random(0), Spread(bound=3.0), []
    for _ in range(3 * EXACT):
        values.append(dice.lognormvariate(0.0, 1.0))
        spread.add(values[-1])
    values.sort()
    assert len(spread._counts) < 1000
    for share in (0.01, 0.5, 0.9, 0.99, 0.9999):
        assert spread.quantile(share) == pytest.approx(values[int(share * len(values)) - 1], rel=0.006)
    assert spread.over == sum(value > 3.0 for value in values)
    spread.add(0.0)
    assert spread.quantile(0.0) == 0.0


def test_a_time_line_is_thinned_out_evenly() -> None:
    line = Timeline("value")
    for second in range(100_000):
        line.add(float(second), second % 7)
    times = line.columns()["time"]
    assert POINTS / 2 < len(times) <= 2 * POINTS
    assert max(b - a for a, b in itertools.pairwise(times)) < 4 * 100_000 / POINTS
    assert times[-1] > 99_000


def test_a_short_time_line_is_kept_whole() -> None:
    line = Timeline("value")
    for second in range(5):
        line.add(second, 2 * second)
    assert line.columns() == {"time": [0, 1, 2, 3, 4], "value": [0, 2, 4, 6, 8]}


def test_jains_index_is_one_for_equal_shares_and_one_nth_for_a_single_taker() -> None:
    assert (jain([5, 5, 5, 5]), jain([9, 0, 0]), jain([0, 0])) == (1.0, pytest.approx(1 / 3), 1.0)


def of(tenant: str, num_prompt: int = 100) -> Request:
    return Request(tenant, [0] * num_prompt, labels={"tenant": tenant})


def test_service_is_compared_among_tenants_that_wait_all_through_a_window() -> None:
    heavy, light, away = of("heavy"), of("light"), of("away")
    fairness = Fairness(window=10.0)
    fairness.look(0.0, [heavy, light, away])
    fairness.served(Step((Chunk(heavy, 0, 60, False), Chunk(away, 0, 1, False))))
    fairness.served(
        Step((Chunk(light, 0, 18, False), Chunk(light, 18, 1, True)))
    )  # 18 + 1 computed, 2 for the token said
    fairness.look(10.0, [heavy, light])
    found = fairness.summary()
    assert found is not None
    assert found["compared"] == {
        "jain": pytest.approx(81**2 / (2 * (60**2 + 21**2)), abs=1e-6),
        "jain_worst": found["compared"]["jain"],
        "largest_difference": 39,
    }


def test_what_is_computed_again_after_a_preemption_is_no_service() -> None:
    victim, other = of("victim"), of("other")
    victim.peak_computed = 60
    fairness = Fairness(window=10.0)
    fairness.served(Step((Chunk(victim, 0, 70, False), Chunk(other, 0, 5, False))))
    fairness.finished("victim", 1.5)
    found = fairness.summary()
    assert found is not None
    assert (found["tenants"]["victim"]["service"], found["compared"]) == (10, None)
    assert found["tenants"]["victim"]["ttft"]["p50"] == 1.5


def test_one_tenant_has_nobody_to_be_compared_with() -> None:
    fairness = Fairness(window=10.0)
    fairness.served(Step((Chunk(of("only"), 0, 5, False),)))
    assert fairness.summary() is None
