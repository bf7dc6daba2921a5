"""What a simulated request costs: a hundred thousand of a chat, up to a thousand running at once. `make bench` runs
them all, a plain test run the first few. Times are shown, never asserted; what is asserted is that every token was said and
that memory does not grow with the trace."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest

from turnout.compose import plugins
from turnout.compose.config import Limits
from turnout.lab.simulate import measure
from turnout.lab.simulate.analytic import Analytic
from turnout.lab.simulate.command import _little_garbage
from turnout.lab.simulate.config import SimulateConfig
from turnout.lab.simulate.loop import Simulation
from turnout.lab.simulate.record import SimulationRecord
from turnout.lab.workload.synthetic import Chat
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.preemption import Recompute
from turnout.plugins.scheduler import FCFS

pytestmark = pytest.mark.slow


def simulate(chat: Chat, num_blocks: int | None, seats: int) -> SimulationRecord:
    config = SimulateConfig(
        FCFS(), Recompute(), PagedBlocks(16, num_blocks), chat, Analytic(), Limits(max_num_seqs=seats)
    )
    with _little_garbage():
        return Simulation(config, plugins.load().manager).run()


@pytest.mark.benchmark(group="simulate")
def test_a_hundred_thousand_requests_of_a_chat(benchmark: Any, request: pytest.FixtureRequest) -> None:
    whole = request.config.getoption("benchmark_only")
    num_requests, seats = (100_000, 1000) if whole else (300, 100)
    record: SimulationRecord = benchmark.pedantic(simulate, (Chat(num_requests), None, seats), rounds=1)
    assert record.num_finished == num_requests
    wall = record.summary()["wall"]
    benchmark.extra_info["tokens"] = record.stats.generated_tokens
    benchmark.extra_info["us_per_token"] = wall["token_us"]
    benchmark.extra_info["us_per_step"] = {k: wall[k] for k in ("schedule_us", "account_us", "other_us")}


def peak(num_requests: int) -> int:
    """Bytes of what was allocated during the simulation, in a cache that is soon full."""
    gc.collect()
    tracemalloc.start()
    try:
        simulate(Chat(num_requests, rate=200.0, prompt=20, output=5), num_blocks=300, seats=64)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in ("EXACT", "POINTS"):  # distinct latencies, and points of the gauges: reached by both runs
        monkeypatch.setattr(measure, kept, 100)
    peak(50)  # what is cached once and for all
    once, fivefold = peak(400), peak(2000)
    assert fivefold < 1.2 * once
