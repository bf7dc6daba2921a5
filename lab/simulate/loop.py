"""One simulation: arrivals in, engine stepped, outputs counted. The engine is the served one; only its runner is not.

    arrivals ─▶ Engine.add      when the clock passes them
                Engine.step ─▶ SimulatedRunner.run     the clock passes the step's time
                Outputs ─▶ Record

An engine with nothing to do lets the clock jump to the next arrival.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence

from turnout.compose import plugins
from turnout.core.engine import Engine
from turnout.core.hooks import Hooks
from turnout.core.interfaces import BlockManager
from turnout.core.types import EngineInfo
from turnout.lab.simulate.analytic import Analytic
from turnout.lab.simulate.config import SimulateConfig
from turnout.lab.simulate.record import SimulationRecord
from turnout.lab.simulate.runner import Latency, SimulatedRunner, VirtualClock
from turnout.lab.workload.arrivals import VOCAB_SIZE, Arrival, Workload

TELL = 0.5  # seconds of wall time between two signs of life

OnProgress = Callable[[int, float], None]  # (requests finished, seconds simulated)


class Simulation:
    """Everything of one run. The components in `config` have state: they are good for one simulation."""

    def __init__(
        self, config: SimulateConfig, hooks: Hooks, factor: float = 1.0, allowed: Mapping[str, int] | None = None
    ) -> None:
        """`factor`: arrivals come so many times as often; `allowed`: see Record. Raises ValueError for an option."""
        self.config, self._factor = config, factor
        latency: Latency = config.latency
        latency.start(config.blocks.block_size)
        self.info = info_of(config)
        self.clock = VirtualClock()
        self._answers: dict[str, Sequence[int]] = {}
        self.runner = SimulatedRunner(self.clock, latency, self._answers)
        self.engine = Engine(
            self.runner, config.scheduler, config.blocks, config.preemption, self.info, hooks=hooks, clock=self.clock
        )
        self.record = SimulationRecord(config, allowed)
        workload: Workload = config.workload
        self._coming = workload.arrivals(factor, config.limits.max_num_seqs)
        self._next = next(self._coming, None)
        self._later: list[tuple[float, int, Arrival]] = []  # what clients send when something has finished
        self._open: dict[str, Arrival] = {}
        self._number, self._began = 0, -1.0

    def run(self, on_progress: OnProgress = lambda finished, seconds: None) -> SimulationRecord:
        """To the end, or until it is hopeless. Raises ValueError for a faulty trace, ContractError for a policy."""
        engine, clock, record, runner = self.engine, self.clock, self.record, self.runner
        began = spoke = time.perf_counter()
        while not record.hopeless:
            due = self._add_due()
            if not engine.busy:
                if due == math.inf:
                    break
                clock.now = due
                continue
            before, runner.entered, self._began = time.perf_counter(), 0.0, clock.now
            outputs = engine.step()
            after = time.perf_counter()
            record.wall(before, runner.entered, runner.left, after)
            if outputs:
                for output in record.step(outputs, clock.now):
                    self._finished(output.request_id)
                    record.finished(output, self._open.pop(output.request_id).request)
            clock.now = min(clock.now + engine.pause, max(due, clock.now))
            record.gauges(clock.now, engine)
            if after - spoke > TELL:
                spoke = after
                on_progress(record.num_finished, clock.now)
        if record.num_refused and not record.num_finished and not record.hopeless:
            raise ValueError(f"every request is refused: {record.first_refusal}")
        record.offered = self.config.workload.asked(self._factor, record.num_added, record.last_arrival)
        record.close(clock.now, engine.stats, time.perf_counter() - began)
        return record

    def _add_due(self) -> float:
        """Add what has arrived. Returns when the next one will; infinity: never."""
        now = self.clock.now
        while True:
            coming = math.inf if self._next is None else self._next.request.arrived
            later = self._later[0][0] if self._later else math.inf
            if min(coming, later) > now:
                return min(coming, later)
            if later < coming:
                self._add(heapq.heappop(self._later)[2])
            else:
                assert self._next is not None
                self._add(self._next)
                self._next = next(self._coming, None)
                if self._next is None:
                    self.record.num_behind = sum(r.arrived <= self._began for r in self.engine.waiting)

    def _add(self, arrival: Arrival) -> None:
        request = arrival.request
        try:
            self.engine.add(request)
        except ValueError as error:
            self.record.refused(request, str(error))
            return
        self._open[request.id] = arrival
        if arrival.answer is not None:
            self._answers[request.id] = arrival.answer
        if self.record.added(request):
            self.runner.watch = self.record.fairness.served

    def _finished(self, request_id: str) -> None:
        self._answers.pop(request_id, None)
        then = self._open[request_id].then
        if then is not None:
            follow = then(self.clock.now)
            if follow is not None:
                self._number += 1
                heapq.heappush(self._later, (follow.request.arrived, self._number, follow))


def info_of(config: SimulateConfig) -> EngineInfo:
    """The engine's limits. Raises ValueError when nothing says how many blocks there are."""
    blocks: BlockManager = config.blocks
    limits, latency, size = config.limits, config.latency, blocks.block_size
    known = isinstance(latency, Analytic)
    max_len = limits.max_model_len or (latency.max_len if known else None)
    if known and limits.max_model_len is not None and limits.max_model_len > latency.max_len:
        raise ValueError(
            f"limits.max_model_len is {limits.max_model_len}, but {latency.model} was made for {latency.max_len} tokens"
        )
    notes: tuple[str, ...] = ()
    num_blocks = blocks.num_blocks
    if num_blocks is None and max_len is None:
        raise ValueError(
            "blocks.num_blocks is null, and only latency=analytic knows a memory to fill: set it to what "
            "the engine's start said, for example blocks.num_blocks=4096"
        )
    if num_blocks is None:
        assert isinstance(latency, Analytic)
        assert max_len is not None
        room, note = latency.blocks(size, limits.gpu_memory_utilization, limits.cpu_memory_utilization)
        num_blocks = min(room, limits.max_num_seqs * -(-max_len // size))
        notes = (note,)
    return EngineInfo(
        model=latency.model if known else "simulated",
        path="",
        architecture="simulated",
        dtype="none",
        device="virtual",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_len or num_blocks * size + 1,
        num_blocks=num_blocks,
        block_size=size,
        capacity=num_blocks * size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        fingerprint="",
        composition={},
        plugins={},
        versions=plugins.versions(),
        notes=notes,
    )
