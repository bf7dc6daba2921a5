"""Prefix-aware: the longest cached beginning first, and nobody waits for others' for long."""

from __future__ import annotations

import pytest
from virtual import ask, drive, first_chunks, timed_engine

from turnout.core import Request
from turnout.plugins.scheduler import FCFS, PrefixAware


def families(num: int, of: int) -> list[Request]:
    """Requests of `of` documents, taking turns; those of one share 40 tokens."""
    return [
        Request(f"{i % of}-{i}", [100 * (i % of) + j for j in range(40)] + [900 + i], ask("", 1, 2).sampling)
        for i in range(num)
    ]


def test_who_shares_what_is_cached_goes_before_who_does_not() -> None:
    engine, _ = timed_engine(PrefixAware(), max_num_seqs=1, num_blocks=40)
    drive(engine, [ask("warm", 40, 1)])
    half = Request("half", [*range(20), *range(500, 520)], ask("", 1, 2).sampling)
    drive(engine, [ask("cold", 40, 2, first=300), half, ask("whole", 40, 2), ask("cold2", 40, 2, first=600)])
    assert first_chunks(engine) == ["warm", "whole", "half", "cold", "cold2"]


def test_requests_of_one_document_run_together_and_more_is_found_in_the_cache_than_by_arrival() -> None:
    def cached(scheduler: FCFS | PrefixAware) -> int:
        engine, _ = timed_engine(scheduler, max_num_seqs=1, num_blocks=14)
        drive(engine, families(24, 4))
        return engine.stats.cached_tokens

    assert cached(FCFS()) == 0
    assert cached(PrefixAware(max_wait=100.0)) == (24 - 4) * 40


def test_who_has_waited_long_enough_goes_first_by_arrival() -> None:
    engine, _ = timed_engine(PrefixAware(max_wait=0.5), max_num_seqs=1, num_blocks=40)
    warm = [ask(f"warm{i}", 40, 10, arrived=1 + i / 100) for i in range(60)]
    cold = [ask("cold", 40, 2, first=300, arrived=1.055), ask("cold2", 40, 2, first=600, arrived=1.305)]
    drive(engine, [*warm, *cold])
    for late in cold:
        started = late.scheduled_at or 0.0
        passed_it = [r for r in warm if r.arrived > late.arrived and (r.scheduled_at or 0.0) < started]
        assert all((r.scheduled_at or 0.0) < late.arrived + 0.5 for r in passed_it) and started >= late.arrived + 0.5
        assert late is not cold[0] or passed_it
    assert first_chunks(engine).index("cold") < first_chunks(engine).index("cold2")


def test_only_the_oldest_of_those_that_wait_are_compared() -> None:
    engine, _ = timed_engine(PrefixAware(window=2), max_num_seqs=1, num_blocks=40)
    drive(engine, [ask("warm", 40, 1)])
    drive(engine, [ask("cold", 40, 2, first=300), ask("cold2", 40, 2, first=600), ask("whole", 40, 2)])
    assert first_chunks(engine) == ["warm", "cold", "whole", "cold2"]


@pytest.mark.parametrize("options", [{"max_wait": -1.0}, {"window": 0}, {"chunk": 0}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"scheduler.{next(iter(options))} must"):
        PrefixAware(**options)  # type: ignore[arg-type]
