"""A scheduler that does anything a scheduler may do, by lot, and now and then what it may not. The core has to be right
whatever it does; nobody is served well by it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core.draft import Draft
from turnout.core.types import PreemptMode, RequestView
from turnout.testing.watched import Misstep

MODES = (None, PreemptMode.SWAP, PreemptMode.RECOMPUTE)


@dataclass
class Shuffle:
    """Takes and preempts in any order, in pieces of any length, by either mode; breaks off in the middle of a step.

    After `mischief` steps it only shuffles, and gives way to whoever came furthest: everybody ends.
    """

    seed: int = 0
    mischief: int = 40  # steps
    missteps: bool = False  # raise Misstep now and then, when part of the step is drawn up

    def __post_init__(self) -> None:
        if self.mischief < 0:
            raise ValueError(f"scheduler.mischief must not be negative, got {self.mischief}")
        self._dice, self._left = random.Random(self.seed), self.mischief

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        self._left -= 1
        if self._left < 0:
            self._honest(waiting, running, draft)
            return
        dice = self._dice
        pool = [*running, *waiting]
        dice.shuffle(pool)
        taken: set[str] = set()
        if dice.random() < 0.2:  # many at once
            draft.run([r for r in running if dice.random() < 0.7], limit=dice.choice((None, 2)))
            taken = {one.request.id for one in draft.taken} | {one.id for one in draft.preempted}
        for request in pool:
            runs, lot = request in running, dice.random()
            if self.missteps and lot > 0.96:
                raise Misstep("in the middle of a step")
            if request.id in taken or lot < 0.1:
                continue
            if runs and lot < 0.25:
                draft.preempt(request, dice.choice(MODES))
                taken.add(request.id)
            elif lot < 0.4:
                others = [other for other in running if other is not request]
                draft.run([request], spare=others, limit=dice.randint(1, 9))
                taken |= {request.id} | {one.id for one in draft.preempted}
            else:
                draft.cached(request)
                draft.take(request, dice.choice((None, 1, 2, 3, 5)))
                taken.add(request.id)

    def _honest(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        draft.run(sorted(running, key=lambda request: -request.num_computed))
        for request in waiting:
            if draft.preempted or not draft.take(request):
                return
