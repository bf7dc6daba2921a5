"""Shortest job first, with ageing so that long prompts are not starved."""

from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, Request


@dataclass
class SJF:
    """Runs what runs, then admits the shortest prompt; a second of waiting is worth `ageing` tokens."""

    ageing: float = 64.0  # tokens per second

    def __post_init__(self) -> None:
        if self.ageing < 0:
            raise ValueError(f"scheduler.ageing must not be negative, got {self.ageing}")

    def schedule(self, waiting: Sequence[Request], running: Sequence[Request], draft: Draft) -> None:
        queue = list(running)
        while queue and not draft.full:
            request = queue.pop(0)
            while not draft.take(request):  # out of blocks: the newest starts over later
                victim = queue.pop() if queue else request
                draft.preempt(victim)
                if victim is request:
                    return
        for request in sorted(waiting, key=lambda r: r.num_pending - self.ageing * (draft.now - r.arrived)):
            if draft.preempted or draft.full or not draft.take(request):
                return
