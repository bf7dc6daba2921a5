"""The most urgent first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, Policy, RequestView


@dataclass
class Priority(Policy):
    """Runs requests by `priority`, a lower number earlier; who is urgent takes the seat or the blocks of who is less so.

    A level is worth `ageing` seconds of waiting: the queue is ordered by arrived + ageing * priority, which never changes,
    so no two requests can take each other's place in turn (ageing against starvation: Silberschatz, Operating System
    Concepts, 5.3.4). Use it where interactive and batch work share an engine.

    Bound: a request that is d levels more urgent passes another only if it arrives within d * ageing seconds after it.
    With `ageing=null` the levels are strict, and a level starves while those above it fill the engine. Equals never push
    each other out: preempted is only who has a higher number and stands later in the queue.
    """

    ageing: float | None = 30.0  # seconds of waiting that are worth one level; null: none are
    chunk: int = 256  # tokens of one prompt in a step, at most

    def __post_init__(self) -> None:
        if self.ageing is not None and not self.ageing >= 0:
            raise ValueError(f"scheduler.ageing must not be negative, got {self.ageing}")
        if self.chunk < 1:
            raise ValueError(f"scheduler.chunk must be at least 1, got {self.chunk}")

    def order(self, request: RequestView, draft: Draft) -> tuple[float, ...]:
        if self.ageing is None:
            return (request.priority, request.arrived)
        return (request.arrived + self.ageing * request.priority, request.priority)

    def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        least = max(request.priority for request in candidates)
        return draft.victim([request for request in candidates if request.priority == least])

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        if not waiting or not running:
            return super().schedule(waiting, running, draft)
        queue = deque(sorted(running, key=lambda r: self.order(r, draft)))
        coming = deque(sorted(waiting, key=lambda r: self.order(r, draft)))
        while coming:
            place = self.order(coming[0], draft)
            if not queue or self.order(queue[-1], draft) <= place:
                break
            while queue and self.order(queue[0], draft) <= place:
                request = queue.popleft()
                draft.run((request,), spare=queue, limit=self.chunk, victim=self.victim)
                if draft.preempted:
                    queue = deque(r for r in queue if r not in draft.preempted)
            if queue and not self._enter(coming.popleft(), queue, draft):
                coming.clear()  # nobody passes it
        draft.run(queue, limit=self.chunk, victim=self.victim)
        for request in coming:
            if not draft.admit(request, self.chunk):
                return

    def _enter(self, request: RequestView, queue: deque[RequestView], draft: Draft) -> bool:
        """Admit a waiting request ahead of running ones, at the expense of those below its level if need be."""
        if draft.seats_left > 0 and draft.missing(request) <= 0:
            return bool(draft.take(request, self.chunk))
        below = [other for other in queue if other.priority > request.priority]
        if not below or draft.missing(request) > sum(other.num_blocks for other in below):
            draft.explain(request, "no seat or not enough blocks, even if all that is less urgent made room")
            return False
        while draft.seats_left <= 0 or draft.missing(request) > 0:
            if not below:
                return False
            victim = self.victim(below, draft)
            below.remove(victim)
            queue.remove(victim)
            draft.preempt(victim)
            draft.explain(victim, f"preempted to make room for {request.id}, which is more urgent")
        return bool(draft.take(request, self.chunk))
