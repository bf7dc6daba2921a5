"""Whatever a policy does: an exception with its name, whole blocks, no request lost, and nobody's tokens wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fickle import alone, requests
from virtual import Clock, ask, timed_engine

from turnout.core import ContractError, Draft, Policy, PreemptMode, Request, RequestView, Sampling
from turnout.core import engine as core_engine
from turnout.core.engine import FRUITLESS_STEPS, IDLE_SECONDS, Engine
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler import FCFS
from turnout.testing import check_balance, make_engine, serve_all

Crime = Callable[["Hostile", RequestView, Draft], object]


def swallowed(call: Callable[[], object]) -> None:
    try:
        call()
    except ContractError:
        pass


def from_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=lambda: swallowed(call))
    thread.start()
    thread.join()


def for_ever() -> None:
    while True:
        pass


CRIMES: dict[str, tuple[Crime, str]] = {
    "takes twice": (lambda self, victim, draft: draft.take(victim), "already in this step"),
    "takes twice and hides it": (
        lambda self, victim, draft: swallowed(lambda: draft.take(victim)),
        "already in this step",
    ),
    "runs what it took": (lambda self, victim, draft: draft.run([victim]), "already in this step"),
    "preempts what it took": (lambda self, victim, draft: draft.preempt(victim), "already in this step"),
    "takes a stranger": (lambda self, victim, draft: draft.take(view_of("stranger")), "no such request"),
    "takes a copy with the same id": (
        lambda self, victim, draft: draft.take(view_of(self.other.id)),
        "no such request",
    ),
    "takes a request itself": (lambda self, victim, draft: draft.take(self.other._request), "no such request"),
    "takes nothing at all": (lambda self, victim, draft: draft.take(None), "AttributeError"),  # type: ignore[arg-type]
    "looks at a stranger": (lambda self, victim, draft: draft.cached(view_of("stranger")), "no such request"),
    "keeps the draft": (lambda self, victim, draft: self.old.take(self.other), "after the step was closed"),
    "asks for nothing": (lambda self, victim, draft: draft.take(self.other, 0), "limit must be at least 1"),
    "raises": (lambda self, victim, draft: {}["its own bug"], "its own bug"),
    "leaves": (lambda self, victim, draft: raised(SystemExit("goodbye")), "goodbye"),
    "calls from another thread": (
        lambda self, victim, draft: from_another_thread(lambda: draft.take(self.other)),
        "from another thread",
    ),
    "never returns": (lambda self, victim, draft: for_ever(), "did not return within 0.3 s"),
    "waits for ever": (
        lambda self, victim, draft: draft.wait(victim, float("inf"), ""),
        "seconds on the engine's clock",
    ),
    "gives itself tokens": (lambda self, victim, draft: setattr(draft, "tokens_left", 10**6), "tokens_left"),
    "gives itself seats": (lambda self, victim, draft: setattr(draft, "seats_left", 10**6), "seats_left"),
    "closes the step": (lambda self, victim, draft: draft.close(), "no attribute 'close'"),  # type: ignore[attr-defined]
    "undoes the step": (lambda self, victim, draft: draft.undo(), "no attribute 'undo'"),  # type: ignore[attr-defined]
    "changes a draft's method": (lambda self, victim, draft: setattr(draft, "take", print), "read-only"),
    "teaches the estimate": (lambda self, victim, draft: setattr(draft.cost, "weights", ()), "can't set attribute"),
    "rewrites reasons": (lambda self, victim, draft: draft.reasons.update({"0": ""}), "no attribute 'update'"),  # type: ignore[attr-defined]
    "changes tokens in place": (lambda self, victim, draft: victim.tokens.append(1), "no attribute 'append'"),  # type: ignore[attr-defined]
    "changes labels in place": (lambda self, victim, draft: victim.labels.update(a="b"), "no attribute 'update'"),  # type: ignore[attr-defined]
    "reaches for blocks": (lambda self, victim, draft: victim.blocks, "no attribute 'blocks'"),  # type: ignore[attr-defined]
    "reaches for sampling": (lambda self, victim, draft: victim.sampling, "no attribute 'sampling'"),  # type: ignore[attr-defined]
    **{
        f"writes {name}": (
            lambda self, victim, draft, name=name: setattr(victim, name, 7),  # type: ignore[misc]
            f"request.{name} can't be written",
        )
        for name in ("tokens", "num_computed", "blocks", "sampling", "priority", "arrived", "labels", "id", "anything")
    },
    "deletes a label": (lambda self, victim, draft: delattr(victim, "labels"), "can't be deleted"),
}


def view_of(rid: str) -> RequestView:
    return RequestView(Request(rid, [1, 2]))


def raised(error: BaseException) -> None:
    raise error


class Hostile:
    """Runs like FCFS for two steps, then commits its crime with all but one request taken."""

    old: Draft

    def __init__(self, crime: Crime) -> None:
        self.crime, self.steps = crime, 0

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        self.steps += 1
        if self.steps <= 2:
            self.old = draft
            return FCFS().schedule(waiting, running, draft)
        *others, self.other = (*running, *waiting)
        for request in others:
            draft.take(request)
        self.crime(self, running[0], draft)


@pytest.mark.parametrize("crime", CRIMES)
@pytest.mark.parametrize("preemption", [Recompute(), Swap(host_blocks=8)], ids=["recompute", "swap"])
def test_a_hostile_scheduler_gets_a_clear_exception_and_the_blocks_are_whole(
    crime: str, preemption: Recompute | Swap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_engine, "SCHEDULE_SECONDS", 0.3)
    asked = requests(1, num=6, max_tokens=30)
    commit, told = CRIMES[crime]
    engine = make_engine(Hostile(commit), num_blocks=100, max_num_batched_tokens=200, preemption=preemption)
    got: dict[str, list[int]] = {r.id: [] for r in asked}
    for request in asked:
        engine.add(request)
    with pytest.raises(ContractError, match="the scheduler Hostile failed.*" + told):
        while engine.busy:
            for output in engine.step():
                got[output.request_id] += output.tokens
    check_balance(engine)
    assert engine.stats.scheduler_failures == 1
    engine._scheduler = FCFS()  # nothing was lost: an honest one goes on
    while engine.busy:
        for output in engine.step():
            got[output.request_id] += output.tokens
        check_balance(engine)
    assert got == alone(asked)
    assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap == 0  # nor computed again


def test_a_scheduler_that_fails_every_third_time_serves_everybody() -> None:
    class Flaky(FCFS):
        calls = 0

        def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
            super().schedule(waiting, running, draft)
            self.calls += 1
            if self.calls % 3 == 0:
                raise ValueError("now and then")

    asked = requests(4)
    engine = make_engine(Flaky(), num_blocks=20, preemption=Swap(host_blocks=6))
    for request in asked:
        engine.add(request)
    got: dict[str, list[int]] = {r.id: [] for r in asked}
    while engine.busy:
        try:
            for output in engine.step():
                got[output.request_id] += output.tokens
        except ContractError:
            check_balance(engine)
    assert got == alone(asked) and engine.stats.scheduler_failures > 3


def test_what_cannot_be_served_can_be_ended_with_a_reason_and_the_engine_goes_on() -> None:
    engine = make_engine(Policy(), num_blocks=40, max_num_seqs=2)
    for request in (ask("a", 4, 9), ask("b", 4, 9, first=50), ask("c", 4, 9, first=90)):
        engine.add(request)
    child = ask("d", 5, 2)
    child.parent = "c"
    engine.add(child)
    engine.step()
    failed = engine.fail("the scheduler broke down")
    assert sorted((o.request_id, o.error) for o in failed) == [(rid, "the scheduler broke down") for rid in "abcd"]
    assert not engine.busy and engine.stats.num_blocks_free == 40
    asked = requests(1)
    assert serve_all(engine, asked) == alone(asked)


class Waits(Policy):
    """Lets each request wait for so many seconds, and says so or not."""

    def __init__(self, seconds: float, says: bool) -> None:
        self.seconds, self.says = seconds, says

    def filter(self, request: RequestView, draft: Draft) -> bool | str:
        until = request.arrived + self.seconds
        if draft.now >= until:
            return True
        if self.says:
            draft.wait(request, until, "over its rate")
            return False
        return "over its rate"


def slept(engine: Engine, clock: Clock, most: int) -> int:
    """Steps made by somebody who sleeps as long as the engine says."""
    for count in range(most):
        if not engine.busy:
            return count
        engine.step()
        clock.now += engine.pause
    raise AssertionError(f"not served in {most} steps")


def test_a_policy_that_waits_on_purpose_is_served_for_as_long_as_it_says_so_and_nobody_spins() -> None:
    engine, clock = timed_engine(Waits(3600.0, says=True))
    engine.add(ask("a", 3, 2))
    assert slept(engine, clock, 10) == 3
    assert clock.now > 3600


def test_waiting_ends_when_the_first_that_waits_may_run() -> None:
    engine, clock = timed_engine(Waits(100.0, says=True))
    engine.add(ask("later", 3, 2, arrived=51.0))
    engine.add(ask("sooner", 3, 2, arrived=1.0))
    engine.step()
    assert engine.pause == pytest.approx(100.0)
    clock.now += engine.pause
    engine.step()
    assert [request.id for request in engine.running] == ["sooner"] and engine.pause == 0.0


def test_a_short_wait_need_not_be_announced() -> None:
    engine, clock = timed_engine(Waits(2.0, says=False))
    engine.add(ask("a", 3, 2))
    assert slept(engine, clock, 3000) > 1000


def test_a_policy_that_runs_nothing_and_never_says_that_it_waits_is_found_in_seconds() -> None:
    engine, clock = timed_engine(Waits(1e6, says=False))
    engine.add(ask("a", 3, 2))
    with pytest.raises(ContractError, match="the scheduler Waits failed.*ran nothing for 10.* while 1 requests wait"):
        slept(engine, clock, 20_000)
    assert clock.now < 1.0 + IDLE_SECONDS + 0.1
    check_balance(engine)


def test_an_engine_that_was_idle_for_an_hour_finds_no_fault_at_once() -> None:
    engine, clock = timed_engine(Waits(2.0, says=False))
    for number in range(3):
        engine.add(ask(str(number), 3, 2))
        slept(engine, clock, 3000)
        clock.now += 3600.0


def test_preempting_everything_in_every_step_is_told_as_no_progress() -> None:
    class PingPong:
        def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
            for request in running:
                draft.preempt(request)
            if not running:
                for request in waiting:
                    draft.take(request, 1)

    engine = make_engine(PingPong())
    engine.add(Request("a", [1, 2, 3]))
    with pytest.raises(ContractError, match="no request came further"):
        for _ in range(2 * FRUITLESS_STEPS):
            engine.step()
    check_balance(engine)


class TestPreemptionPolicies:
    @pytest.mark.parametrize(
        ("crime", "told"),
        [
            (lambda request: setattr(request, "num_computed", 0), "can't be written"),
            (lambda request: {}[request.id], "KeyError"),
            (lambda request: for_ever(), "did not return within 0.3 s"),
        ],
        ids=["writes", "raises", "never returns"],
    )
    def test_one_that_misbehaves_breaks_off_the_step_and_nothing_else(
        self, crime: Callable[[RequestView], Any], told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(core_engine, "SCHEDULE_SECONDS", 0.3)

        class Bad(Recompute):
            crimes = 1

            def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
                if self.crimes:
                    self.crimes -= 1
                    crime(request)
                return PreemptMode.RECOMPUTE

        asked = requests(2)
        engine = make_engine(FCFS(), num_blocks=16, preemption=Bad())
        got: dict[str, list[int]] = {r.id: [] for r in asked}
        told_of = []
        for request in asked:
            engine.add(request)
        while engine.busy:
            try:
                for output in engine.step():
                    got[output.request_id] += output.tokens
            except ContractError as error:
                told_of.append(str(error))
            check_balance(engine)
        assert got == alone(asked) and len(told_of) == 1 and told in told_of[0]


def test_a_policys_view_follows_its_request() -> None:
    seen: list[tuple[Any, ...]] = []

    class Looks(FCFS):
        def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
            for r in (*waiting, *running):
                seen.append((r.num_tokens, r.num_computed, r.num_pending, r.num_generated, r.num_blocks, len(r.tokens)))
            super().schedule(waiting, running, draft)

    engine = make_engine(Looks())
    engine.add(Request("a", [1, 2, 3, 4], Sampling(0, max_tokens=3), labels={"tenant": "x"}))
    while engine.busy:
        engine.step()
    assert seen == [(4, 0, 4, 0, 0, 4), (5, 4, 1, 1, 1, 5), (6, 5, 1, 2, 2, 6)]


def test_a_call_that_lasts_long_but_returns_in_time_is_left_alone() -> None:
    class Slow(FCFS):
        def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
            time.sleep(0.02)
            super().schedule(waiting, running, draft)

    engine = make_engine(Slow())
    engine._schedule_limit.seconds = 0.3
    engine.add(Request("a", [1, 2, 3, 4], Sampling(0, max_tokens=30)))
    while engine.busy:
        engine.step()
