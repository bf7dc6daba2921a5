"""A runner that computes nothing: it lets the time of a step pass on a virtual clock and says tokens known before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from turnout.core.types import Result, Step
from turnout.lab.workload.arrivals import FILLER
from turnout.lab.workload.work import Work, work_of


class Latency(Protocol):
    """A latency model: a dataclass whose fields are its options."""

    def start(self, block_size: int) -> None:
        """Read, fit or measure what is needed, for blocks of so many tokens. Raises ValueError naming the option."""
        ...

    def seconds(self, work: Work) -> float:
        """How long a step takes."""
        ...

    def assumptions(self) -> list[str]:
        """What the numbers rest on, a sentence each."""
        ...


class VirtualClock:
    """Seconds that pass only when somebody says so. Give it to the engine as its clock."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class SimulatedRunner:
    """Advances `clock` by what `latency` says of each step.

    `answers` maps a request id to the tokens it says, one for each it samples; requests that are not in it say FILLER.
    `watch` sees every step before its time passes. `entered` and `left` are when the last call of `run` began and ended
    on the wall clock: what lies before and after is the engine's own cost.
    """

    def __init__(
        self,
        clock: VirtualClock,
        latency: Latency,
        answers: dict[str, Sequence[int]] | None = None,
        watch: Callable[[Step], None] | None = None,
    ) -> None:
        self.clock, self.latency, self.watch = clock, latency, watch
        self.answers: dict[str, Sequence[int]] = {} if answers is None else answers
        self.entered = self.left = 0.0

    def run(self, step: Step) -> Result:
        self.entered = time.perf_counter()
        if self.watch is not None:
            self.watch(step)
        work = work_of(step.chunks, len(step.swap_out) + len(step.swap_in), len(step.copies))
        self.clock.now += self.latency.seconds(work)
        tokens = self._said(step) if self.answers else [FILLER] * work.samples
        self.left = time.perf_counter()
        return Result(tokens)

    def _said(self, step: Step) -> list[int]:
        tokens = []
        for request, _, _, samples in step.chunks:
            if samples:
                answer = self.answers.get(request.id)
                tokens.append(FILLER if answer is None else answer[request.num_generated])
        return tokens
