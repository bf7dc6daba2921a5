"""The one with the least time to lose first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, RequestView

MIN_CHUNK = 16  # tokens that the most pressing prompt gets in every step, whatever the targets of running streams


@dataclass
class Deadline:
    """Least slack first: the time until a request's next token is due, less what computing it is expected to take
    (least slack time: Mok, MIT 1983; the estimate is `draft.cost`).

    A first token is due `ttft_target` seconds after arrival; the next ones each `itl_target` later. A request brings its
    own targets as labels of these names, in seconds; the options are for those without. Every stream gets its token in
    every step, prompts what fits before the step exceeds the tightest stream's `itl_target`. Out of blocks, prompts under
    way give way before streams do, and of each kind the one with the most slack. Use it where requests have deadlines of different kinds.

    Bound: a request is passed only by those that arrive within the difference of the two `ttft_target`s, and of the two
    times to compute, after it. Targets that can't be kept are missed by all alike: who is late only gets more pressing.
    """

    ttft_target: float = 1.0  # seconds from arrival to the first token, without a label of this name
    itl_target: float = 0.1  # seconds from token to token, without a label of this name

    def __post_init__(self) -> None:
        for name in ("ttft_target", "itl_target"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"scheduler.{name} must be more than 0 seconds, got {getattr(self, name)}")

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        streams = [r for r in running if r.num_pending == 1]
        prompts = deque(sorted((r for r in running if r.num_pending != 1), key=lambda r: self.slack(r, draft)))
        pace = min((self._target(request, "itl_target", draft) for request in streams), default=math.inf)
        draft.run(streams, spare=prompts, victim=self._victim)
        coming: deque[RequestView] = deque()
        if draft.seats_left > 0 and not draft.preempted:
            coming.extend(sorted(waiting, key=lambda r: self.slack(r, draft)))
        while prompts or coming:
            under_way = not coming or bool(prompts) and self.slack(prompts[0], draft) <= self.slack(coming[0], draft)
            request = (prompts if under_way else coming).popleft()
            fits = draft.fits(request, pace) if pace < math.inf else draft.tokens_left
            limit = max(fits, 0 if draft.load.prefill_tokens else MIN_CHUNK)
            if not limit or not draft.tokens_left:
                return
            if under_way:
                draft.run((request,), spare=prompts, limit=limit, victim=self._victim)
            elif not draft.admit(request, limit):
                coming.clear()  # nobody passes it

    def slack(self, request: RequestView, draft: Draft) -> float:
        """Seconds until work on its next token must begin."""
        if request.first_token_at is None:
            due = request.arrived + self._target(request, "ttft_target", draft)
        else:
            due = request.first_token_at + request.num_generated * self._target(request, "itl_target", draft)
        return due - draft.now - draft.cost.recompute(request.num_tokens)

    def _victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        return max(reversed(candidates), key=lambda r: self.slack(r, draft))

    def _target(self, request: RequestView, name: str, draft: Draft) -> float:
        label = request.labels.get(name)
        if label is None:
            return float(getattr(self, name))
        try:
            seconds = float(label)
        except ValueError:
            seconds = math.nan
        if 0 < seconds < math.inf:
            return seconds
        draft.explain(request, f"its label {name}={label!r} is no number of seconds, so scheduler.{name} counts")
        return float(getattr(self, name))
