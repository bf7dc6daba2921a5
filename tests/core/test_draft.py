"""What a scheduler may rely on when it admits, preempts and explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from virtual import ask

from turnout.core import ContractError, Draft, Request, RequestView
from turnout.core.engine import Engine
from turnout.plugins.scheduler import FCFS
from turnout.testing import make_engine

Script = Callable[[Sequence[RequestView], Sequence[RequestView], Draft], Any]


class Scripted:
    """Serves first come, first served, until it is told to do something once."""

    def __init__(self) -> None:
        self.script: Script | None = None

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        script, self.script = self.script, None
        (script or FCFS().schedule)(waiting, running, draft)


def engine_with(*running: Request, **options: Any) -> tuple[Engine, Scripted]:
    scheduler = Scripted()
    engine = make_engine(scheduler, **options)
    for request in running:
        engine.add(request)
    if running:
        engine.step()
    return engine, scheduler


def once(engine: Engine, scheduler: Scripted, script: Script) -> Any:
    found: list[Any] = []
    scheduler.script = lambda *seen: found.append(script(*seen))
    engine.step()
    return found[0]


class TestAdmit:
    def test_it_declines_what_does_not_fit_whole_beside_what_runs_and_says_how_much_is_missing(self) -> None:
        engine, scheduler = engine_with(ask("runs", 16, 9), num_blocks=10)
        engine.add(ask("big", 30, 2, first=100))

        def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            return (
                draft.missing(waiting[0]),
                draft.admit(waiting[0], 4),
                draft.reasons["big"],
                draft.take(waiting[0], 4),
            )

        assert once(engine, scheduler, script) == (2, 0, "out of blocks: 2 more must become free", 4)

    def test_a_cached_prefix_counts_as_fitting(self) -> None:
        engine, scheduler = engine_with(ask("runs", 16, 9), num_blocks=10)
        engine.add(ask("alike", 30, 2))  # four blocks of it are those of the running one
        assert once(engine, scheduler, lambda waiting, running, draft: draft.admit(waiting[0])) == 14

    def test_the_rest_of_a_prompt_under_way_keeps_its_room(self) -> None:
        engine, scheduler = engine_with(num_blocks=10)
        engine.add(ask("first", 30, 2))
        engine.add(ask("second", 16, 2, first=100))

        def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            return draft.admit(waiting[0], 4), draft.blocks_free, draft.missing(waiting[1]), draft.admit(waiting[1], 4)

        assert once(engine, scheduler, script) == (4, 9, 1, 0)

    def test_room_that_was_just_made_is_for_nobody_else(self) -> None:
        engine, scheduler = engine_with(ask("runs", 5, 9), ask("goes", 5, 9), num_blocks=20)
        engine.add(ask("waits", 5, 2))

        def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            draft.preempt(running[1])
            return draft.admit(waiting[0]), draft.reasons["waits"], draft.take(running[0])

        assert once(engine, scheduler, script) == (0, "others were preempted in this step", 1)

    def test_where_nothing_runs_anybody_may_try(self) -> None:
        kept = ask("kept", 20, 1)
        kept.keep = True
        engine, scheduler = engine_with(kept, num_blocks=6)
        engine.add(ask("next", 20, 2, first=100))

        def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            return draft.missing(waiting[0]), draft.admit(waiting[0])

        assert once(engine, scheduler, script) == (4, 20)


class TestRun:
    def test_a_victim_that_is_no_candidate_is_told(self) -> None:
        asked = [ask(name, 8, 9, first=100 * i) for i, name in enumerate("abc")]
        engine, scheduler = engine_with(*asked, num_blocks=6)

        def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            return draft.run(running, victim=lambda candidates, draft: running[0])

        with pytest.raises(ContractError, match="the victim 'a' is none of the candidates"):
            while engine.busy:
                once(engine, scheduler, script)

    def test_victims_come_from_those_that_are_spare_and_their_reason_names_whom_they_make_room_for(self) -> None:
        asked = [ask(name, 7, 9, first=100 * i) for i, name in enumerate("abc")]
        engine, scheduler = engine_with(*asked, num_blocks=6)
        once(engine, scheduler, lambda waiting, running, draft: [draft.take(request) for request in running])

        def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            a, b, c = running
            taken = draft.run([a], spare=[b, c], victim=lambda candidates, draft: candidates[0])
            return taken, draft.preempted == [b], draft.reasons["b"]

        assert once(engine, scheduler, script) == (1, True, "preempted to make room for a")

    def test_those_behind_give_way_where_nobody_is_spare_and_are_passed_over(self) -> None:
        asked = [ask(name, 8, 9, first=100 * i) for i, name in enumerate("abc")]
        engine, scheduler = engine_with(*asked, num_blocks=6)

        def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            return draft.run(running), [r.id for r in draft.preempted], [taken.request.id for taken in draft.taken]

        assert once(engine, scheduler, script) == (2, ["c"], ["a", "b"])

    def test_one_that_finds_nobody_gives_way_itself(self) -> None:
        asked = [ask(name, 8, 9, first=100 * i) for i, name in enumerate("abc")]
        engine, scheduler = engine_with(*asked, num_blocks=6)

        def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            return draft.run(running[:1]), [r.id for r in draft.preempted]

        assert once(engine, scheduler, script) == (0, ["a"])

    def test_it_stops_where_the_budget_ends(self) -> None:
        engine, scheduler = engine_with(*(ask(str(i), 4, 9, first=9 * i) for i in range(3)))
        engine.info = replace(engine.info, max_num_batched_tokens=2)

        def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            return draft.run(running), [taken.request.id for taken in draft.taken], dict(draft.reasons)

        assert once(engine, scheduler, script) == (2, ["0", "1"], {"2": "the step's tokens are all taken"})


def test_reasons_given_in_one_step_are_kept_together_each_once() -> None:
    engine, scheduler = engine_with(ask("a", 3, 9))

    def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
        for reason in ("one thing", "another", "one thing"):
            draft.explain(running[0], reason)
        return draft.reasons["a"]

    assert once(engine, scheduler, script) == "one thing; another"


def test_taken_is_what_was_taken() -> None:
    engine, scheduler = engine_with(ask("a", 3, 9))
    engine.add(ask("b", 6, 2))

    def script(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
        before = draft.taken
        draft.take(running[0])
        draft.take(waiting[0], 4)
        return before, [(taken.request.id, taken.num_tokens, taken.samples) for taken in draft.taken]

    assert once(engine, scheduler, script) == ([], [("a", 1, True), ("b", 4, False)])


class OneByOne:
    """First come, first served, by the two calls that everything else is made of."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        queue = list(running)
        while queue and draft.tokens_left:
            request = queue.pop(0)
            while not draft.take(request):
                victim = draft.victim(queue) if queue else request
                draft.preempt(victim)
                if victim is request:
                    break
                queue.remove(victim)
        for request in waiting:
            if not draft.admit(request):
                return


class TestRunAgainstTakingOneByOne:
    @pytest.mark.parametrize(("num_blocks", "budget"), [(200, 64), (200, 3), (12, 64), (16, 5)])
    def test_it_makes_the_same_steps_as_taking_one_by_one(self, num_blocks: int, budget: int) -> None:
        steps = []
        for scheduler in (FCFS(), OneByOne()):
            engine = make_engine(scheduler, num_blocks=num_blocks, max_num_batched_tokens=budget)
            for number in range(9):
                engine.add(ask(str(number), 5 + 3 * number, 12, first=50 * number))
            made = []
            while engine.busy:
                engine.step()
                step = engine._runner.steps[-1]  # type: ignore[attr-defined]
                made.append(
                    [(c.request.id, *c[1:]) for c in step.chunks] + [(r.id, "preempted") for r in step.preempted]
                )
            steps.append(made)
        assert steps[0] == steps[1]

    def test_it_keeps_the_rules_that_take_keeps(self) -> None:
        engine, scheduler = engine_with(ask("a", 4, 9), ask("b", 4, 9, first=50), num_blocks=40)

        def twice(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            draft.run([*running, running[0]])

        with pytest.raises(ContractError, match="already in this step"):
            once(engine, scheduler, twice)
        stranger: Any = ask("stranger", 4, 9)

        def foreign(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> Any:
            draft.run([stranger])

        engine.step()
        with pytest.raises(ContractError, match="no such request"):
            once(engine, scheduler, foreign)
