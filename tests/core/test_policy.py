"""A scheduler out of four hooks, each overridden alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from virtual import ask, drive, first_chunks, timed_engine

from turnout.core import Draft, Policy, RequestView
from turnout.testing import continuation, make_engine, serve_all


def test_nothing_overridden_is_first_come_first_served() -> None:
    engine, _ = timed_engine(Policy(), max_num_seqs=1)
    drive(engine, [ask(name, 4, 3, arrived=1.0 + i / 1000) for i, name in enumerate("abcd")])
    assert first_chunks(engine) == list("abcd")


def test_chunk_limits_what_one_request_gets_in_a_step() -> None:
    @dataclass
    class Small(Policy):
        chunk: int = 3

    engine, _ = timed_engine(Small())
    drive(engine, [ask("a", 8, 2), ask("b", 4, 2)])
    sizes = [[chunk.num_tokens for chunk in step.chunks] for step in engine._runner.steps]  # type: ignore[attr-defined]
    assert sizes == [[3, 3], [3, 1], [2, 1], [1]]


class TestOrder:
    class Urgent(Policy):
        def order(self, request: RequestView, draft: Draft) -> tuple[float, ...]:
            return (request.priority, request.arrived)

    def test_those_that_wait_are_admitted_by_it(self) -> None:
        engine, _ = timed_engine(self.Urgent(), max_num_seqs=1)
        drive(engine, [ask("a", 4, 2, priority=2), ask("b", 4, 2, priority=1), ask("c", 4, 2, priority=3)])
        assert first_chunks(engine) == ["b", "a", "c"]

    def test_those_that_run_make_room_for_those_before_them(self) -> None:
        engine = make_engine(self.Urgent(), num_blocks=8)
        asked = [ask(name, 8, 16, priority=p, first=100 * p) for name, p in (("a", 3), ("b", 2), ("c", 1))]
        serve_all(engine, asked)
        assert [r.num_preemptions > 0 for r in asked] == [True, True, False]


class TestFilter:
    class Quota(Policy):
        """At most one request of a tenant runs at a time."""

        def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
            super().schedule(waiting, running, draft)
            self.reasons = dict(draft.reasons)

        def filter(self, request: RequestView, draft: Draft) -> bool | str:
            tenant = request.labels["tenant"]
            if request.num_blocks or all(taken.request.labels["tenant"] != tenant for taken in draft.taken):
                return True
            return f"{tenant} has one running"

    def test_who_is_held_back_is_passed_by_others_and_the_reason_is_noted(self) -> None:
        engine, _ = timed_engine(policy := self.Quota())
        engine.add(ask("a", 4, 3, tenant="x"))
        engine.add(ask("b", 4, 3, tenant="x"))
        engine.add(ask("c", 4, 3, tenant="y"))
        engine.step()
        assert [request.id for request in engine.running] == ["a", "c"]
        assert policy.reasons == {"b": "x has one running"}
        drive(engine, [])

    def test_a_running_request_that_may_not_run_keeps_its_blocks_and_is_the_first_to_make_room(self) -> None:
        class Pause(Policy):
            paused = False

            def filter(self, request: RequestView, draft: Draft) -> bool | str:
                return not self.paused or request.id != "a"

        policy = Pause()
        engine = make_engine(policy, num_blocks=10)
        asked = [ask(name, 7, 24, first=100 * i) for i, name in enumerate("abc")]
        for request in asked:
            engine.add(request)
        engine.step()
        policy.paused = True
        for _ in range(4):
            engine.step()
        assert [request.num_generated for request in asked] == [1, 5, 5] and len(asked[0].blocks) == 2
        while not engine.waiting:
            engine.step()
        assert [request.num_preemptions for request in asked] == [1, 0, 0]
        policy.paused = False
        while engine.busy:
            engine.step()
        assert [r.tokens[7:] for r in asked] == [continuation(r.tokens[:7], 24) for r in asked]


class TestScore:
    def test_the_highest_is_admitted_first_and_equals_go_by_order(self) -> None:
        class Shortest(Policy):
            def score(self, request: RequestView, draft: Draft) -> float:
                return -request.num_pending

        engine, _ = timed_engine(Shortest(), max_num_seqs=1)
        drive(engine, [ask("a", 9, 2), ask("b", 4, 2), ask("c", 6, 2), ask("d", 4, 2)])
        assert first_chunks(engine) == ["b", "d", "c", "a"]

    def test_it_may_change_from_step_to_step(self) -> None:
        class Turning(Policy):
            def score(self, request: RequestView, draft: Draft) -> float:
                return request.num_prompt if draft.now < 1.015 else -request.num_prompt

        engine, _ = timed_engine(Turning(), max_num_seqs=1)
        drive(engine, [ask(str(n), n, 2) for n in (4, 5, 6, 7)])
        assert first_chunks(engine) == ["7", "6", "4", "5"]

    def test_nobody_passes_one_that_finds_no_room(self) -> None:
        engine, _ = timed_engine(Policy(), num_blocks=10)
        drive(engine, [ask("runs", 16, 12), ask("big", 30, 2, first=50), ask("small", 2, 2, first=90)])
        assert first_chunks(engine) == ["runs", "big", "small"]


class TestVictim:
    def test_it_says_who_makes_room(self) -> None:
        seen: list[list[str]] = []

        class Second(Policy):
            def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
                seen.append([request.id for request in candidates])
                return candidates[0]

        engine = make_engine(Second(), num_blocks=9)
        asked = [ask(name, 8, 12, first=100 * i) for i, name in enumerate("abc")]
        for request in asked:
            engine.add(request)
        engine.step()
        while not engine.waiting:
            engine.step()
        assert seen == [["b", "c"]] and [request.id for request in engine.waiting] == ["b"]
