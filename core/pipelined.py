"""The loop for a runner that computes one step while the next is scheduled. `engine.py` has the plain one.

    schedule 1 │ submit 1 │ schedule 2 │ submit 2 │ finish 1 │ schedule 3 │ submit 3 │ finish 2 │ …
    runner     │          computes 1   │               computes 2         │     computes 3

A step in flight is taken for computed when the next one is scheduled: its requests go on with a token that is PENDING.
What it computes for those that end meanwhile is thrown away. Steps are computed in order, so a block may be given to another
request while the step before still writes to it. A step the runner declines (None) is run alone, once the one before it
is finished, so a runner that declines each makes this the plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple, cast

from turnout.core.engine import Engine, PlannedStep
from turnout.core.optional import AsyncRunner
from turnout.core.types import PENDING, Output, Request, Result, Step


class InFlight(NamedTuple):
    """A step that is being computed."""

    planned: PlannedStep
    future: Future[Result]


class PipelinedEngine(Engine):
    """An engine for an `AsyncRunner`."""

    _in_flight: InFlight | None = None

    @property
    def busy(self) -> bool:
        """Some request is not finished, or a step is in flight."""
        return self._in_flight is not None or super().busy

    @property
    def pause(self) -> float:
        return 0.0 if self._in_flight is not None else super().pause

    def step(self) -> list[Output]:
        """Schedule and submit a step, finish the one before it. See Engine.step for what it raises."""
        if not super().busy:
            return self._finish_in_flight()[0]  # all who were in it have ended
        settled = self._settle_grammars()
        planned = self._plan()
        future = cast(AsyncRunner, self._runner).submit(planned.step)
        outputs, failure = self._finish_in_flight()
        outputs = settled + outputs
        if failure is not None:  # it was built on what failed
            self._settle(happened=future is not None)
            outputs += self._finish(planned, failure)
        elif future is None:
            planned = planned._replace(step=self._without_ended(planned.step))
            outputs += self._finish(planned, self._compute(planned))
        else:
            self._settle(happened=True)  # there was nothing to move
            going_on = self._without_ended(planned.step)
            self._mark_computed(going_on, planned.began)
            self._mark_pending(going_on)
            self._in_flight = InFlight(planned, future)
        self._release_children()
        self._update_gauges()
        return outputs

    def fail(self, reason: str) -> list[Output]:
        return [*self._finish_in_flight()[0], *super().fail(reason)]

    def _schedulable(self) -> Iterable[Request]:
        """Not those whose last token is being computed."""
        return [request for request in super()._schedulable() if request.num_pending]

    def _finish_in_flight(self) -> tuple[list[Output], Exception | None]:
        """Wait for the step that is being computed. Returns what its requests got, and why it failed."""
        if self._in_flight is None:
            return [], None
        (planned, future), self._in_flight = self._in_flight, None
        result = self._guarded(future.result, planned)
        self._resume_at = -math.inf  # what it gave may let others run
        outputs = self._finish(planned, result)
        self._update_gauges()
        return outputs, result if isinstance(result, Exception) else None

    def _mark_pending(self, step: Step) -> None:
        """Let the requests that are being sampled for go on with a token that isn't known yet."""
        for request, _, _, samples in step.chunks:
            if samples and request.num_generated + 1 < request.sampling.max_tokens:
                request.tokens.append(PENDING)

    def _without_ended(self, step: Step) -> Step:
        """The step without those that ended while it was scheduled."""
        if all(chunk.request.finish is None for chunk in step.chunks):
            return step
        chunks = tuple(chunk for chunk in step.chunks if chunk.request.finish is None)
        return replace(step, chunks=chunks, constraint=self._grammars.constrain(chunks))
