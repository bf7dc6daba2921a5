"""No composition of scheduler, victim rule and preemption mode goes round in circles, on any trace in a small cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import drive, timed_engine

from turnout.core import Preemption, Request, Sampling, Scheduler
from turnout.core.engine import Engine
from turnout.plugins.preemption import Auto, Recompute, Swap
from turnout.plugins.preemption.victims import RULES
from turnout.plugins.scheduler import FCFS, ChunkedPrefill, Deadline, Fair, PrefixAware, Priority
from turnout.testing import check_balance, continuation

chunks = st.sampled_from([1, 3, 16, 64])
targets = st.sampled_from([1e-4, 0.01, 1.0])
schedulers: st.SearchStrategy[Scheduler] = st.one_of(
    st.builds(FCFS),
    st.builds(ChunkedPrefill, chunks, chunks, st.none(), st.sampled_from([0, 5]), st.integers(1, 2)),
    st.builds(ChunkedPrefill, target_itl=targets),
    st.builds(Priority, st.sampled_from([None, 0.0, 0.05, 30.0]), chunks),
    st.builds(Fair, chunk=chunks),
    st.builds(Deadline, targets, targets),
    st.builds(PrefixAware, st.sampled_from([0.0, 0.05, 100.0]), st.integers(1, 8), chunks),
)
rules = st.sampled_from(list(RULES))
host = st.sampled_from([0, 3, 40])
preemptions: st.SearchStrategy[Preemption] = st.one_of(
    st.builds(Recompute, rules), st.builds(Swap, host, rules), st.builds(Auto, host, rules)
)


@dataclass(frozen=True)
class Trace:
    """Requests that each fit into the cache, most of which can't do so together."""

    scheduler: Scheduler
    preemption: Preemption
    budgets: dict[str, int]
    requests: tuple[tuple[tuple[int, ...], int, int, float, str], ...]  # prompt, max_tokens, priority, arrived, tenant

    def engine(self, **options: Any) -> Engine:
        return timed_engine(copy.deepcopy(self.scheduler), **(self.budgets | options))[0]

    def asked(self, at_once: bool) -> list[Request]:
        return [
            Request(
                f"r{i}",
                list(prompt),
                Sampling(0, max_tokens=num),
                arrived=1.0 if at_once else 1.0 + arrived,
                priority=priority,
                labels={"tenant": tenant, "ttft_target": str(0.01 + arrived)},
            )
            for i, (prompt, num, priority, arrived, tenant) in enumerate(self.requests)
        ]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    size, num_blocks = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(3, 24))
    budgets = {
        "block_size": size,
        "num_blocks": num_blocks,
        "max_num_batched_tokens": draw(st.sampled_from([1, 3, 8, 64])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 4, 16])),
    }

    @st.composite
    def request(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, float, str]:
        room = draw(st.integers(2, size * num_blocks))
        num_prompt = draw(st.integers(1, room - 1))
        first = draw(st.sampled_from([0, 0, 300, 600]))
        prompt = tuple((first + i) % 900 for i in range(num_prompt))
        arrived = draw(st.floats(0.0, 0.5))
        return prompt, room - num_prompt, draw(st.integers(0, 3)), arrived, draw(st.sampled_from("abc"))

    asked = draw(st.lists(request(), min_size=2, max_size=9))
    return Trace(draw(schedulers), draw(preemptions), budgets, tuple(asked))


def served(engine: Engine, asked: Sequence[Request]) -> int:
    """Steps until all are served, each with its own tokens, the books in balance after every step."""
    wanted = {r.id: continuation(r.tokens, r.sampling.max_tokens) for r in asked}
    drive(engine, asked, lambda: check_balance(engine))
    assert {r.id: r.tokens[r.num_prompt :] for r in asked} == wanted
    assert engine.stats.num_blocks_free == engine.info.num_blocks
    assert engine.stats.host_blocks_free == engine.stats.host_blocks
    return engine.stats.num_steps


def one_after_another(trace: Trace) -> int:
    """Steps when each has the engine for itself."""
    return sum(served(trace.engine(), [request]) for request in trace.asked(at_once=True))


@given(traces())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_serving_requests_together_never_takes_more_steps_than_one_after_another(trace: Trace) -> None:
    together = served(trace.engine(preemption=trace.preemption), trace.asked(at_once=True))
    assert together <= one_after_another(trace)


@given(traces())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_nor_do_requests_that_come_later_but_for_what_urgent_ones_throw_away(trace: Trace) -> None:
    engine = trace.engine(preemption=trace.preemption)
    steps = served(engine, trace.asked(at_once=False))
    lost = engine.stats.recomputed_tokens if isinstance(trace.scheduler, Priority) else 0
    assert steps <= one_after_another(trace) + lost
