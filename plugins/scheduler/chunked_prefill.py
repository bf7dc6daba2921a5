"""Decodes first; prompts share what the budget leaves, in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, Request


@dataclass
class ChunkedPrefill:
    """Keeps running streams flowing while prompts are computed a piece at a time (Sarathi-Serve, OSDI 2024).

    Every running stream gets its token in every step; prompts then get up to `chunk` tokens each, oldest first, and
    `max_prefill_tokens` together. Smaller values: smoother streams, later first tokens. Out of blocks, the newest
    gives way. Nobody starves: decodes always run, and the oldest prompt is the first to be continued.
    """

    chunk: int = 256  # tokens of one prompt in a step, at most
    max_prefill_tokens: int = 512  # tokens of all prompts in a step, at most

    def __post_init__(self) -> None:
        for name in ("chunk", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"scheduler.{name} must be at least 1, got {getattr(self, name)}")

    def schedule(self, waiting: Sequence[Request], running: Sequence[Request], draft: Draft) -> None:
        decodes = deque(r for r in running if not r.prefilling)
        prefills = deque(r for r in running if r.prefilling)
        while decodes and not draft.full:
            request = decodes.popleft()
            while not draft.take(request):  # out of blocks: prompts under way give way before streams do
                victim = prefills.pop() if prefills else decodes.pop() if decodes else request
                draft.preempt(victim)
                if victim is request:
                    return
        left = self.max_prefill_tokens
        while prefills and left and not draft.full:
            request = prefills.popleft()
            while not (taken := draft.take(request, min(self.chunk, left))):
                victim = prefills.pop() if prefills else request
                draft.preempt(victim)
                if victim is request:
                    return
            left -= taken
        for request in waiting:
            if draft.preempted or draft.full or not left:
                return
            taken = draft.take(request, min(self.chunk, left))
            if not taken:
                return
            left -= taken
