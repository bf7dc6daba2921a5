"""The step log of a running engine: its last steps, and the account of its requests. In memory, bounded, always on.

It listens to the hooks, on the engine's thread. What one step costs it does not grow with the requests that just decode
beyond one look at each; `tests/benchmarks/test_steplog_cost.py` measures it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

from turnout.core import Finish, Request, Step, StepReport, hookimpl
from turnout.server.steplog.account import Account
from turnout.server.steplog.events import Finished
from turnout.server.steplog.pieces import Seen
from turnout.server.steplog.record import finished, ways_back
from turnout.server.steplog.why import view

MOST_REASONS = 8  # kept of one step


class StepEntry(NamedTuple):
    """What is kept of a step."""

    number: int
    began: float  # seconds on the engine's clock
    schedule_seconds: float
    seconds: float
    prefill_tokens: int
    decodes: int
    waiting: int
    running: int
    blocks_free: int
    preempted: tuple[tuple[str, str], ...]  # request id, "recompute" or "swap"
    reasons: Mapping[str, str]  # the first few
    error: str | None


class StepLog:
    """Register it with the hooks before the engine is built."""

    def __init__(
        self, num_steps: int = 1000, num_requests: int = 1000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.account = Account(num_requests)
        self.steps: deque[StepEntry] = deque(maxlen=num_steps)
        self._clock = clock
        self._finished: list[Finished] = []  # since the last step

    @hookimpl
    def request_added(self, request: Request) -> None:
        self.account.added(request, live=True)

    @hookimpl
    def request_finished(self, request: Request) -> None:
        if request.finish is Finish.ABORT:  # between two steps
            self.account.aborted(request.id, self._clock(), finished(request))
        else:
            self._finished.append(finished(request))

    @hookimpl
    def step_finished(self, step: Step, report: StepReport) -> None:
        special, preempted = self.account.special, ways_back(step) if step.preempted else []
        chunks: list[tuple[str, int, int, bool]] = []
        if special:
            chunks = [(r.id, start, count, samples) for r, start, count, samples in step.chunks if r.id in special]
        ended, self._finished = self._finished, []
        load = self.account.step(
            Seen(
                report.began,
                report.ended,
                chunks,
                len(step.chunks),
                preempted,
                report.reasons,
                ended,
                lambda: {chunk.request.id for chunk in step.chunks},
            )
        )
        self.steps.append(
            StepEntry(
                report.number,
                report.began,
                report.scheduled - report.began,
                report.ended - report.began,
                *load,
                report.num_waiting,
                report.num_running,
                report.num_blocks_free,
                tuple(preempted),
                dict(islice(report.reasons.items(), MOST_REASONS)),
                report.error,
            )
        )

    def why(self, name: str) -> list[dict[str, object]]:
        """The accounts of a request that is open or ended lately, by its id here or with the client; empty: none."""
        now = self._clock()
        return [view(self.account, record, now) for record in self.account.find(name)]

    def requests(self) -> list[dict[str, object]]:
        """Every open request in short, then those that ended lately, the last one first."""
        now, account = self._clock(), self.account
        records = (*account.open.values(), *reversed(account.ended.values()))
        return [
            {
                "id": record.id,
                "client_id": record.labels.get("request"),
                "state": record.end.why if record.end else record.what,
                "reason": record.reason,
                "seconds": (now if record.ended_at is None else record.ended_at) - record.arrived,
            }
            for record in records
        ]

    def tail(self, num: int) -> str:
        """The last steps, a line each, and why who waits does."""
        lines = [_line(entry) for entry in list(self.steps)[-num:]]
        waiting = [record for record in self.account.open.values() if not record.computes]
        lines += [f"{record.id} is {record.what}: {record.reason}" for record in islice(waiting, MOST_REASONS)]
        return "\n".join(lines) or "none"


def _line(entry: StepEntry) -> str:
    said = [
        f"step {entry.number}: {entry.prefill_tokens} prompt tokens, {entry.decodes} decodes in {entry.seconds:.4f} s",
        f"{entry.waiting} wait, {entry.running} run, {entry.blocks_free} blocks free",
    ]
    said += [f"{rid} preempted ({how})" for rid, how in entry.preempted]
    return "; ".join(said) + (f"; failed: {entry.error}" if entry.error else "")
