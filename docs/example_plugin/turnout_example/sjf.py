"""Shortest job first, with ageing so that long prompts are not starved."""

from dataclasses import dataclass

from turnout.core import Draft, Policy, RequestView


@dataclass
class SJF(Policy):
    """Runs what runs, then admits the shortest prompt; a second of waiting is worth `ageing` tokens."""

    ageing: float = 64.0  # tokens per second

    def __post_init__(self) -> None:
        if self.ageing < 0:
            raise ValueError(f"scheduler.ageing must not be negative, got {self.ageing}")

    def score(self, request: RequestView, draft: Draft) -> float:
        return self.ageing * (draft.now - request.arrived) - request.num_pending
