"""Numbers from samples, by hand."""

from __future__ import annotations

import pytest

from turnout.lab.bench.pareto import front
from turnout.lab.bench.sample import Sample
from turnout.lab.bench.summary import over_runs, summary
from turnout.lab.simulate.config import Target

ANY = Target(None, None)


def sample(planned: float, *deliveries: tuple[float, int], error: str | None = None, tenant: str = "") -> Sample:
    num = sum(count for _, count in deliveries)
    ended = deliveries[-1][0] if deliveries else planned + 0.001
    return Sample(f"r{planned}", planned, planned + 0.25, 10, num, tenant, list(deliveries), ended, error)


def test_latencies_are_the_fields_own_and_count_from_the_planned_time() -> None:
    one = sample(1.0, (3.0, 1), (3.5, 1), (5.0, 2))
    assert (one.ttft, one.e2e, one.itl) == (2.0, 4.0, [0.5, 1.5])
    assert one.tpot == pytest.approx(2.0 / 3)  # three tokens after the first, in two seconds
    found = summary([one], 5.0, 1.0, ANY, open_loop=True)
    assert found["ttft"]["p50"] == found["ttft"]["p99"] == 2.0
    assert found["itl"]["mean"] == 1.0
    assert found["late"]["max"] == 0.25
    assert found["throughput"] == {"requests": 0.2, "output_tokens": 0.8, "total_tokens": 2.8}


def test_an_answer_that_comes_at_once_has_no_time_between_tokens() -> None:
    found = summary([sample(0.0, (1.0, 5))], 1.0, 0.0, ANY, open_loop=False)
    assert (found["tpot"]["count"], found["itl"]["count"], found["ttft"]["count"]) == (0, 0, 1)
    assert found["offered"] is None


def test_a_failed_request_is_counted_by_kind_and_makes_nothing_faster() -> None:
    good = [sample(0.0, (1.0, 1), (2.0, 1)), sample(1.0, (2.5, 1), (4.0, 1))]
    bad = [
        sample(0.0, error="HTTP 500: boom"),
        sample(0.5, error="HTTP 500: bang"),
        sample(0.0, (0.001, 50), error="disconnected: the stream ended"),
    ]
    found, without = (summary(all_, 4.0, 1.0, ANY, open_loop=True) for all_ in (good + bad, good))
    assert found["requests"]["errors"] == {
        "HTTP 500": {"count": 2, "example": "HTTP 500: boom"},
        "disconnected": {"count": 1, "example": "disconnected: the stream ended"},
    }
    assert (found["requests"]["sent"], found["requests"]["finished"], found["requests"]["failed"]) == (5, 2, 3)
    for name in ("ttft", "itl", "tpot", "e2e", "throughput"):
        assert found[name] == without[name]
    assert found["goodput"]["share"] == 2 / 5


def test_goodput_counts_what_meets_both_targets() -> None:
    fast = sample(0.0, (0.5, 1), (0.6, 1), (0.7, 1))
    late = sample(0.0, (1.5, 1), (1.6, 1))
    slow = sample(0.0, (0.5, 1), (0.9, 1))
    found = summary([fast, late, slow], 2.0, 0.0, Target(1.0, 0.2), open_loop=False)
    assert found["goodput"] == {"requests": 0.5, "share": 1 / 3, "target_ttft": 1.0, "target_itl": 0.2}


def test_the_steady_window_is_from_the_first_answer_to_the_last_request_sent() -> None:
    samples = [sample(0.0, (1.0, 1), (2.0, 1)), sample(0.0, (3.0, 4), (5.0, 6)), sample(6.0, (7.0, 1), (8.0, 1))]
    found = summary(samples, 8.0, 6.0, ANY, open_loop=False)["steady"]
    assert found == {"begin": 2.0, "end": 6.0, "requests": 2 / 4, "output_tokens": 11 / 4}
    assert summary(samples[:2], 5.0, 0.0, ANY, open_loop=False)["steady"] is None


def test_tenants_have_latencies_of_their_own() -> None:
    samples = [sample(0.0, (1.0, 1), tenant="streams"), sample(0.0, (9.0, 1), tenant="documents")]
    found = summary(samples, 9.0, 0.0, ANY, open_loop=False)["tenants"]
    assert {name: values["ttft"]["p50"] for name, values in found.items()} == {"documents": 9.0, "streams": 1.0}


def test_repetitions_give_the_median_and_the_extent_of_every_number() -> None:
    runs = [{"a": {"b": value}, "text": "x"} for value in (3.0, 1.0, 2.0)]
    assert over_runs(runs) == ({"a.b": 2.0}, {"a.b": [1.0, 3.0]})
    median, _ = over_runs([{"steady": None, "n": 1}, {"steady": {"x": 2}, "n": 3}])
    assert median == {"n": 2}  # what one repetition lacks has no median


def test_the_front_has_the_points_that_nobody_beats() -> None:
    points = [(100.0, 5.0), (90.0, 4.0), (90.0, 6.0), (50.0, 4.0), (120.0, 9.0), None, (120.0, 9.0)]
    assert front(points) == [True, True, False, False, True, False, True]
    assert front([]) == []
