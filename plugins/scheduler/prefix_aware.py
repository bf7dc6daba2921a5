"""Whose beginning is already in the cache goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, Policy, RequestView


@dataclass
class PrefixAware(Policy):
    """Admits the request with the longest cached prefix (cache-aware scheduling: SGLang, NeurIPS 2024).

    Use it where many requests share long beginnings (agents, few-shot prompts, documents asked about) and the cache can't
    hold all of them: those that share one run together, before it is evicted. Looking up costs time, so only the oldest
    `window` of those that wait are compared.

    Bound: who has waited for `max_wait` seconds goes before all who have not; such requests go by arrival. So after
    that time nobody is admitted before it but those that arrived earlier.
    """

    max_wait: float = 5.0  # seconds after which a request goes before any cached prefix
    window: int = 128  # requests compared in a step, the oldest that wait
    chunk: int = 256  # tokens of one prompt in a step, at most

    def __post_init__(self) -> None:
        if not self.max_wait >= 0:
            raise ValueError(f"scheduler.max_wait must not be negative, got {self.max_wait}")
        for name in ("window", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"scheduler.{name} must be at least 1, got {getattr(self, name)}")

    def score(self, request: RequestView, draft: Draft) -> float:
        return float("inf") if draft.now - request.arrived >= self.max_wait else draft.cached(request)

    def admit(self, waiting: Sequence[RequestView], draft: Draft) -> None:
        super().admit(waiting[: self.window], draft)
