"""Priority: levels, ageing, and whose place an urgent request may take."""

from __future__ import annotations

import random

import pytest
from virtual import ask, drive, first_chunks, timed_engine

from turnout.core import Request
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler import Priority
from turnout.testing import check_balance, continuation, make_engine


class TestOrder:
    def test_the_lowest_number_starts_first_and_equals_start_as_they_came(self) -> None:
        engine, _ = timed_engine(Priority(), max_num_seqs=1)
        levels = {"a": 2, "b": 0, "c": 1, "d": 0, "e": -3}
        drive(engine, [ask(name, 4, 2, priority=level) for name, level in levels.items()])
        assert first_chunks(engine) == ["e", "b", "d", "c", "a"]

    @pytest.mark.parametrize(("ageing", "first"), [(0.5, "old"), (2.0, "urgent"), (None, "urgent"), (0.0, "old")])
    def test_a_level_is_worth_so_many_seconds_of_waiting(self, ageing: float | None, first: str) -> None:
        engine, _ = timed_engine(Priority(ageing=ageing), max_num_seqs=1, num_blocks=200)
        runs = ask("runs", 4, 500, arrived=1.0)
        drive(engine, [runs, ask("old", 4, 2, priority=2, arrived=1.1), ask("urgent", 4, 2, priority=1, arrived=2.1)])
        assert first_chunks(engine)[1] == first

    @pytest.mark.parametrize("options", [{"ageing": -1.0}, {"chunk": 0}, {"ageing": float("nan")}])
    def test_impossible_options_are_refused(self, options: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=f"scheduler.{next(iter(options))} must"):
            Priority(**options)  # type: ignore[arg-type]


class TestUrgentOnes:
    def test_who_is_urgent_takes_the_seat_of_the_least_urgent_at_once(self) -> None:
        engine, _ = timed_engine(Priority(), max_num_seqs=2)
        low, middle = ask("low", 5, 30, priority=2), ask("middle", 5, 30, priority=1)
        engine.add(low)
        engine.add(middle)
        for _ in range(3):
            engine.step()
        engine.add(urgent := ask("urgent", 5, 3))
        engine.step()
        assert urgent.num_generated == 1
        assert [r.id for r in engine.running] == ["middle", "urgent"] and [r.id for r in engine.waiting] == ["low"]

    def test_who_is_urgent_takes_the_blocks_it_needs_and_no_more(self) -> None:
        engine, _ = timed_engine(Priority(), num_blocks=12)
        running = [ask(str(i), 11, 20, priority=3, first=100 * i) for i in range(3)]
        for request in running:
            engine.add(request)
        engine.step()
        engine.add(urgent := ask("urgent", 18, 2, first=400))
        engine.step()
        assert urgent.num_generated == 1
        assert [r.num_preemptions for r in running] == [0, 0, 1]

    def test_nobody_is_sent_away_where_that_would_not_make_room_enough(self) -> None:
        engine, _ = timed_engine(Priority(), num_blocks=12)
        engine.add(equal := ask("equal", 30, 6))
        engine.add(low := ask("low", 8, 6, priority=1, first=100))
        engine.step()
        engine.add(urgent := ask("urgent", 20, 2, first=400))
        engine.step()
        assert engine.waiting == (urgent,) and low.num_preemptions == equal.num_preemptions == 0
        assert (low.num_generated, equal.num_generated) == (2, 2)

    def test_nobody_less_urgent_passes_one_that_finds_no_room(self) -> None:
        engine, _ = timed_engine(Priority(), num_blocks=12)
        drive(engine, [ask("runs", 30, 6), ask("urgent", 25, 2, first=400), ask("small", 2, 2, priority=1, first=800)])
        assert first_chunks(engine) == ["runs", "urgent", "small"]

    def test_equals_never_push_each_other_out(self) -> None:
        engine, _ = timed_engine(Priority(), max_num_seqs=2)
        asked = [ask(str(i), 5, 10, arrived=1 + i / 100, priority=1) for i in range(8)]
        drive(engine, asked)
        assert [request.num_preemptions for request in asked] == [0] * 8

    def test_each_arrival_sends_away_at_most_one_for_a_seat_and_nobody_comes_back_at_its_expense(self) -> None:
        engine, _ = timed_engine(Priority(ageing=1.0), max_num_seqs=2)
        low = [ask(f"low{i}", 5, 60, priority=4) for i in range(2)]
        urgent = [ask(f"urgent{i}", 5, 4, arrived=1.01 + i * 0.02) for i in range(4)]
        drive(engine, [*low, *urgent])
        assert sum(request.num_preemptions for request in low) <= 4
        assert [request.num_preemptions for request in urgent] == [0] * 4

    def test_who_has_waited_long_enough_is_no_longer_sent_away(self) -> None:
        engine, _ = timed_engine(Priority(ageing=0.05), max_num_seqs=1)
        old = ask("old", 5, 200, priority=1)
        drive(engine, [old, ask("late", 5, 4, arrived=1.3)])
        assert old.num_preemptions == 0
        soon = ask("old", 5, 200, priority=1, arrived=10.0)
        drive(engine, [soon, ask("early", 5, 4, arrived=10.02)])
        assert soon.num_preemptions == 1

    def test_it_says_for_whom_a_request_made_room(self) -> None:
        reasons: list[str] = []

        class Spy(Priority):
            def schedule(self, waiting, running, draft) -> None:  # type: ignore[no-untyped-def]
                super().schedule(waiting, running, draft)
                reasons.append(draft.reasons.get("low", ""))

        engine, _ = timed_engine(Spy(), max_num_seqs=1)
        drive(engine, [ask("low", 5, 200, priority=1), ask("urgent", 5, 4, arrived=1.02)])
        assert "preempted to make room for urgent, which is more urgent" in reasons


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("preemption", [Recompute(), Swap(9)], ids=["recompute", "swap"])
def test_the_books_balance_whoever_takes_whose_place(seed: int, preemption: Recompute | Swap) -> None:
    dice = random.Random(seed)
    options = {"num_blocks": 14, "max_num_seqs": 3, "max_num_batched_tokens": 20}
    engine = make_engine(Priority(ageing=dice.choice([None, 0.0, 1e-3])), preemption=preemption, **options)
    todo = [
        ask(str(i), dice.randint(1, 30), dice.randint(1, 9), first=dice.choice([0, 50 * i]), priority=i * 7 % 5)
        for i in range(14)
    ]
    wanted = {r.id: continuation(r.tokens, r.sampling.max_tokens) for r in todo}
    got: dict[str, list[int]] = {r.id: [] for r in todo}
    while engine.busy or todo:
        if todo and dice.random() < 0.4:
            engine.add(todo.pop())
        for output in engine.step():
            got[output.request_id] += output.tokens
        check_balance(engine)
    assert got == wanted


def test_among_the_least_urgent_the_preemption_policy_chooses() -> None:
    def preempted(rule: str) -> list[str]:
        engine = make_engine(Priority(), num_blocks=16, preemption=Recompute(rule))
        running: list[Request] = [
            ask("big", 20, 5, priority=1),
            ask("small", 8, 5, priority=1, first=300),
            ask("vip", 5, 5, first=600),
        ]
        for request in running:
            engine.add(request)
        engine.step()
        engine.add(ask("urgent", 30, 2, first=700))
        engine.step()
        return [r.id for r in running if r.num_preemptions]

    assert preempted("newest") == ["small"] and preempted("most_blocks") == ["big"]
