"""Requests of ragged lengths for the fake model, what it says to each alone, and a scheduler that does what it likes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from turnout.core import Draft, PreemptMode, Request, RequestView, Sampling
from turnout.testing import continuation


def requests(seed: int, num: int = 10, longest: int = 40, max_tokens: int = 12) -> list[Request]:
    """Prompts of ragged lengths, some of them sharing a beginning."""
    dice = random.Random(seed)
    shared = [dice.randrange(900) for _ in range(longest)]
    found = []
    for i in range(num):
        own = [dice.randrange(900) for _ in range(dice.randint(1, longest))]
        prompt = shared[: dice.randrange(longest)] + own
        found.append(Request(str(i), prompt[:longest], Sampling(0, max_tokens=dice.randint(1, max_tokens))))
    return found


def alone(asked: Sequence[Request]) -> dict[str, list[int]]:
    return {r.id: continuation(r.tokens[: r.num_prompt], r.sampling.max_tokens) for r in asked}


class Fickle:
    """Shuffles, takes random chunks, preempts at random, by either mode: the core must stay right all the same."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        pool = [*running, *waiting]
        self.dice.shuffle(pool)
        progressed = False
        for request in pool:
            if request in running and len(running) > 1 and self.dice.random() < 0.15:
                draft.preempt(request, self.dice.choice([None, PreemptMode.SWAP, PreemptMode.RECOMPUTE]))
            elif draft.take(request, self.dice.randint(1, 9)):
                progressed = True
        if not progressed:
            for request in running:
                if request.num_blocks:
                    draft.preempt(request)
