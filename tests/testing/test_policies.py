"""The contracts of schedulers and preemption policies find what is planted, and pass what is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from turnout.core import ContractError, Draft, Policy, PreemptMode, Request, RequestView
from turnout.core import engine as core_engine
from turnout.testing import PreemptionContract, SchedulerContract, check_component
from turnout.testing.policies import Dice, Plain, rules


class Sound(Plain):
    """Nothing wrong with it."""


class Hoards(Plain):
    """Never forgets an id."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        for request in running:
            self.seen[request.id] = request.num_computed
        super().schedule(waiting, running, draft)


@dataclass
class Starves(Policy):
    """The shortest first, whoever waits."""

    def score(self, request: RequestView, draft: Draft) -> float:
        return -request.num_prompt


@dataclass
class Turns(Policy):
    """Whoever has least to do is first in the queue, so two requests take each other's place."""

    def order(self, request: RequestView, draft: Draft) -> tuple[float, ...]:
        return (request.num_pending,)


class Mutates(Plain):
    """Makes room for itself in the queue."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        for request in waiting:
            request.priority = 0
        super().schedule(waiting, running, draft)


class Hangs(Plain):
    """Never returns."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        while True:
            pass


class Gambles(Plain):
    """Decides by what is not in the draft."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        super().schedule(random.sample(waiting, len(waiting)), running, draft)


class Breaks(Plain):
    """Preempts what it took."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        super().schedule(waiting, running, draft)
        if draft.preempted and draft.taken:
            draft.preempt(draft.taken[0].request)


class Stuck(Plain):
    """Never gives anybody's blocks away."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        for request in (*running, *waiting):
            draft.take(request, 16)


@pytest.mark.parametrize(
    ("scheduler", "rule"),
    [
        (Hoards, "keeps nothing of finished requests"),
        (Starves, "lets nobody starve"),
        (Gambles, "decides alike when all is the same"),
        (Breaks, "when the cache holds two of them"),
        (Stuck, "when the cache holds two of them"),
        (Turns, "its order of two requests stays"),
        (Mutates, "serves every request with room to spare"),
    ],
)
def test_a_scheduler_with_a_fault_is_told_the_rule_it_breaks(scheduler: type, rule: str) -> None:
    broken = [checked.rule for checked in check_component("scheduler", scheduler) if checked.fault]
    assert any(rule in sentence for sentence in broken)


def test_a_scheduler_that_never_returns_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_engine, "SCHEDULE_SECONDS", 0.25)
    _, check = next(rules(SchedulerContract, Hangs))
    with pytest.raises(ContractError, match="the scheduler Hangs failed: it did not return within 0.25 s"):
        check()


def test_a_sound_scheduler_passes() -> None:
    assert [checked for checked in check_component("scheduler", Sound) if checked.fault] == []


class Stranger(Dice):
    """Its victim comes from nowhere."""

    def __init__(self) -> None:
        super().__init__(PreemptMode.RECOMPUTE)

    def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        return Request("stranger", [1])


class Undecided(Dice):
    """Says a word of its own."""

    def __init__(self) -> None:
        super().__init__(PreemptMode.SWAP)

    def mode(self, request: RequestView, draft: Draft) -> Any:
        return "later"


class Remembers(Dice):
    """Keeps its victims."""

    def __init__(self) -> None:
        super().__init__(PreemptMode.SWAP)
        self.victims: list[Request] = []

    def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
        self.victims.append(request)
        return super().mode(request, draft)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Stranger, "its victim is one of the candidates"),
        (Undecided, "its mode is a mode"),
        (Remembers, "keeps nothing of finished requests"),
    ],
)
def test_a_preemption_policy_with_a_fault_is_told_the_rule_it_breaks(policy: type, rule: str) -> None:
    broken = [sentence for sentence, check in rules(PreemptionContract, policy) if _fails(check)]
    assert any(rule in sentence for sentence in broken)


class TestAsAStrangerUsesIt(SchedulerContract):
    """Inheriting is all."""

    make = Sound


class TestPreemptionAsAStrangerUsesIt(PreemptionContract):
    @staticmethod
    def make() -> Dice:
        return Dice(PreemptMode.SWAP)


def _fails(check: Callable[[], object]) -> bool:
    try:
        check()
    except Exception:  # noqa: BLE001  any fault of the policy
        return True
    return False
