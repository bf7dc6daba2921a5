"""A scheduler made of four small decisions, each with a default. It knows no plugin."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from turnout.core.draft import Draft
from turnout.core.types import Request


class Policy:
    """First come, first served, until `order`, `filter`, `score` or `victim` is overridden. Inherit it in a dataclass.

    Whoever runs goes on, in `order`; then those that wait are admitted by `score`, until one finds no room. So nobody
    starves as long as `filter` lets everybody in at last, and `score` grows with the time a request has waited.
    """

    chunk: int | None = None  # tokens of one request in a step, at most; None: as many as the budget leaves

    def order(self, request: Request, draft: Draft) -> tuple[float, ...]:
        """The place in the queue, lowest first: of two running requests the latter makes room for the former.

        Must not change while the request lives: else two take each other's place in turn, and neither comes further.
        """
        return (request.arrived,)

    def filter(self, request: Request, draft: Draft) -> bool | str:
        """Whether the request may take part in this step; False, or the reason why not. A running one that may not
        keeps its blocks, but is the first to make room."""
        return True

    def score(self, request: Request, draft: Draft) -> float:
        """The rank among those that wait, highest first; equals go by `order`. May change from step to step."""
        return 0.0

    def victim(self, candidates: Sequence[Request], draft: Draft) -> Request:
        """Which of these running requests makes room, first in `order` first. Unless overridden, `preemption=` says."""
        return draft.victim(candidates)

    def schedule(self, waiting: Sequence[Request], running: Sequence[Request], draft: Draft) -> None:
        self.run(running, draft)
        if waiting and draft.seats_left > 0 and not draft.full and not draft.preempted:
            self.admit(waiting, draft)

    def run(self, running: Sequence[Request], draft: Draft) -> None:
        """Give those that run their tokens, in `order`. Who is out of blocks gets those of somebody behind it."""
        queue: deque[Request] = deque()
        paused: list[Request] = []
        for request in sorted(running, key=lambda r: self.order(r, draft)):
            (queue if self.allowed(request, draft) else paused).append(request)
        self.go_on(queue, paused, draft)

    def go_on(self, queue: deque[Request], paused: list[Request], draft: Draft) -> None:
        """Run the queue; blocks come from those that are paused, then from the rest of the queue."""
        while (stuck := draft.take_all(queue, self.chunk)) is not None and not draft.full:
            draft.insist(stuck, paused, queue, limit=self.chunk, victim=self.victim)

    def admit(self, waiting: Sequence[Request], draft: Draft) -> None:
        """Admit those that wait, the highest `score` first, until one finds no room."""
        for request in sorted(waiting, key=lambda r: (-self.score(r, draft), self.order(r, draft))):
            if self.allowed(request, draft) and not draft.admit(request, self.chunk):
                return

    def allowed(self, request: Request, draft: Draft) -> bool:
        """What `filter` says, its reason noted."""
        verdict = self.filter(request, draft)
        if verdict is True:
            return True
        draft.explain(request, verdict or "the scheduler's filter holds it back")
        return False
