"""Decodes first; prompts share what the budget leaves, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, RequestView

MIN_CHUNK = 16  # tokens that one prompt gets in every step, whatever the target


@dataclass
class ChunkedPrefill:
    """Keeps running streams flowing while prompts are computed a piece at a time (Sarathi-Serve, OSDI 2024).

    Every stream gets its token in every step; then prompts, oldest first, get up to `chunk` tokens each and
    `max_prefill_tokens` together. With `target_itl` the chunk is instead what the engine's estimate of step cost says
    can be added before a step takes longer than that; while no stream runs, it is all the budget leaves. Use it wherever
    people watch the tokens come. Smaller chunks: smoother streams, later first tokens.

    Bound: as for fcfs. One prompt gets at least 16 tokens in every step, so the target can't be kept where streams alone
    take longer. A prompt beyond `long_prefill_token_threshold` waits for `max_long_partial_prefills` others, while shorter
    ones pass it; when it is its turn, nobody does.
    """

    chunk: int = 256  # tokens of one prompt in a step, at most
    max_prefill_tokens: int = 512  # tokens of all prompts in a step, at most
    target_itl: float | None = None  # seconds a step should take at most while streams run; replaces the two above
    long_prefill_token_threshold: int = 0  # a prompt with more tokens to compute counts as long; 0: none does
    max_long_partial_prefills: int = 1  # long prompts computed at once

    def __post_init__(self) -> None:
        for name in ("chunk", "max_prefill_tokens", "max_long_partial_prefills"):
            if getattr(self, name) < 1:
                raise ValueError(f"scheduler.{name} must be at least 1, got {getattr(self, name)}")
        if self.long_prefill_token_threshold < 0:
            value = self.long_prefill_token_threshold
            raise ValueError(f"scheduler.long_prefill_token_threshold must be 0 (none) or more, got {value}")
        if self.target_itl is not None and not self.target_itl > 0:
            raise ValueError(f"scheduler.target_itl must be more than 0 seconds, got {self.target_itl}")

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        streams, prompts = list[RequestView](), list[RequestView]()
        for request in running:
            (streams if request.num_pending == 1 else prompts).append(request)
        draft.run(streams, spare=prompts)  # prompts under way give way before streams do
        left = self.max_prefill_tokens
        for place, request in enumerate(prompts):
            limit = self._limit(request, left, draft)
            if not limit:
                return
            left -= draft.run((request,), spare=prompts[place + 1 :], limit=limit)
        num_long = sum(map(self._long, prompts))
        for request in waiting:
            if self._long(request):
                if num_long >= self.max_long_partial_prefills:
                    draft.explain(request, f"{num_long} long prompts are being computed")
                    continue
                num_long += 1
            limit = self._limit(request, left, draft)
            if not limit or not (taken := draft.admit(request, limit)):
                return
            left -= taken

    def _long(self, request: RequestView) -> bool:
        return 0 < self.long_prefill_token_threshold < request.num_pending

    def _limit(self, request: RequestView, left: int, draft: Draft) -> int:
        """How many tokens of a prompt may join the step."""
        if self.target_itl is None:
            return min(self.chunk, left)
        load = draft.load
        if not load.decodes:
            return draft.tokens_left
        return max(draft.fits(request, self.target_itl), 0 if load.prefill_tokens else MIN_CHUNK)
