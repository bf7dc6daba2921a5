"""A scheduler made of four small decisions, each with a default. It knows no plugin."""

from __future__ import annotations

from collections.abc import Sequence

from turnout.core.draft import Draft
from turnout.core.types import RequestView


class Policy:
    """First come, first served, until `order`, `filter`, `score` or `victim` is overridden. Inherit it in a dataclass.

    Whoever runs goes on, in `order`; then those that wait are admitted by `score`, until one finds no blocks. So nobody
    starves as long as `filter` lets everybody in at last, and `score` grows with the time a request has waited.
    """

    chunk: int | None = None  # tokens of one request in a step, at most; None: as many as the budget leaves

    def order(self, request: RequestView, draft: Draft) -> tuple[float, ...]:
        """The place in the queue, lowest first: of two running requests the latter makes room for the former.

        Must not change while the request lives: else two take each other's place in turn, and neither comes further.
        """
        return (request.arrived,)

    def filter(self, request: RequestView, draft: Draft) -> bool | str:
        """Whether the request may take part in this step; False, or the reason why not. A running one that may not
        keeps its blocks, but is the first to make room. Where it waits for a time, say so: `draft.wait`."""
        return True

    def score(self, request: RequestView, draft: Draft) -> float:
        """The rank among those that wait, highest first; equals go by `order`. May change from step to step."""
        return 0.0

    def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        """Which of these running requests makes room, first in `order` first. Unless overridden, `preemption=` says."""
        return draft.victim(candidates)

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        queue, paused = list[RequestView](), list[RequestView]()
        for request in sorted(running, key=lambda r: self.order(r, draft)):
            (queue if self.allowed(request, draft) else paused).append(request)
        draft.run(queue, spare=paused, limit=self.chunk, victim=self.victim)
        if waiting and draft.seats_left > 0 and draft.tokens_left and not draft.preempted:
            self.admit(waiting, draft)

    def admit(self, waiting: Sequence[RequestView], draft: Draft) -> None:
        """Admit those that wait, the highest `score` first, until one finds no blocks."""
        for request in sorted(waiting, key=lambda r: (-self.score(r, draft), self.order(r, draft))):
            if self.allowed(request, draft) and not draft.admit(request, self.chunk):
                return

    def allowed(self, request: RequestView, draft: Draft) -> bool:
        """What `filter` says, its reason noted."""
        verdict = self.filter(request, draft)
        if verdict is True:
            return True
        if verdict or request.id not in draft.reasons:
            draft.explain(request, verdict or "the scheduler's filter holds it back")
        return False
