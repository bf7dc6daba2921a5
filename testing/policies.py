"""The rules of schedulers and preemption policies as test classes. They run on the fake model and know no plugin.

    class TestMine(SchedulerContract):
        make = Mine

`turnout plugins check` runs the same methods. A rule's name is its sentence.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import SkipTest

from turnout.core.draft import Draft
from turnout.core.policy import Policy
from turnout.core.types import PreemptMode, Request, RequestView, Sampling
from turnout.testing.audit import reachable
from turnout.testing.fake import check_balance, continuation, make_engine, serve_all

PATIENCE = 1000  # seconds of overload after which everybody must have had its turn

Rules = Iterator[tuple[str, Callable[[], object]]]


def rules(contract: type, make: Callable[[], Any]) -> Rules:
    """The contract's rules for what `make` builds: (sentence, check)."""
    suite = type(contract.__name__, (contract,), {"make": staticmethod(make)})()
    for name in vars(contract):
        if name.startswith("test_"):
            yield name.removeprefix("test_").replace("_", " "), getattr(suite, name)


class SchedulerContract:
    """What every scheduler keeps. `make` builds one, with any options; `patience` is its bound on waiting."""

    make: Callable[[], Any]
    patience = PATIENCE

    def test_it_serves_every_request_with_room_to_spare(self) -> None:
        serves(self.make)

    def test_it_serves_every_request_when_the_cache_holds_two_of_them(self) -> None:
        serves(self.make, num_blocks=14)

    def test_it_serves_every_request_with_one_seat_and_three_tokens_a_step(self) -> None:
        serves(self.make, max_num_batched_tokens=3, max_num_seqs=1)

    def test_it_serves_every_request_when_victims_are_swapped_or_any_of_those_offered(self) -> None:
        for mode in PreemptMode:
            serves(self.make, num_blocks=16, preemption=partial(Dice, mode))

    def test_it_copes_with_aborts_at_any_moment(self) -> None:
        for seed in range(8):
            dice = random.Random(seed)
            engine = make_engine(self.make(), num_blocks=16)
            for request in ragged(seed):
                engine.add(request)
            while engine.busy:
                engine.step()
                engine.abort(f"request-{dice.randrange(12)}")
                check_balance(engine)
            assert engine.stats.num_blocks_free == engine.info.num_blocks, "blocks are missing at the end"

    def test_it_lets_nobody_starve_while_more_arrives_than_it_can_serve(self) -> None:
        seconds = [1.0]
        engine = make_engine(self.make(), num_blocks=24, max_num_seqs=2, clock=lambda: seconds[0])
        common = [7] * 8
        patient = Request("patient", list(range(60)), Sampling(0, max_tokens=12), priority=3)
        for step in range(int(self.patience)):
            for i in range(2):  # short, urgent, alike, of a tenant each: whatever a policy likes, they have it
                labels = {"tenant": f"{step}-{i}", "ttft_target": "0.01", "itl_target": "0.01"}
                engine.add(Request(f"{step}-{i}", [*common, i], Sampling(0, max_tokens=2), labels=labels))
            if step == 3:
                engine.add(patient)
            engine.step()
            seconds[0] += 1.0
            if patient.finish:
                return
        raise AssertionError(
            f"a long request of low priority had {patient.num_generated} of 12 tokens after {self.patience} s"
        )

    def test_its_order_of_two_requests_stays_while_both_live(self) -> None:
        policy, places = self.make(), dict[tuple[RequestView, RequestView], bool]()
        if not isinstance(policy, Policy):
            raise SkipTest("it has no `order` to look at")
        inner = policy.schedule

        def schedule(waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
            for a, b in itertools.combinations(sorted((*waiting, *running), key=lambda r: r.id), 2):
                before = policy.order(a, draft) < policy.order(b, draft)
                assert places.setdefault((a, b), before) is before, f"{a.id} and {b.id} changed places in `order`"
            inner(waiting, running, draft)

        policy.schedule = schedule  # type: ignore[method-assign]
        serves(lambda: policy, num_blocks=14)

    def test_it_keeps_nothing_of_finished_requests(self) -> None:
        engine = make_engine(self.make(), num_blocks=16)
        asked = ragged(1)
        serve_all(engine, asked)
        serve_all(engine, [Request("another", [1, 2, 3])])
        engine.step()
        found = [path for path in reachable(engine, {request.id for request in asked}) if path.startswith("_scheduler")]
        assert not found, f"a request that ended is still held in {', '.join(found)}"

    def test_it_decides_alike_when_all_is_the_same(self) -> None:
        def chunks() -> list[list[tuple[str, int, int]]]:
            seconds = [1.0]
            engine = make_engine(self.make(), num_blocks=16, clock=lambda: seconds[0])
            for request in ragged(2):
                engine.add(request)
            while engine.busy:
                engine.step()
                seconds[0] += 0.25
            runner: Any = engine._runner
            return [[(c.request.id, c.start, c.num_tokens) for c in step.chunks] for step in runner.steps]

        assert chunks() == chunks(), "two runs of the same requests took different steps"


class PreemptionContract:
    """What every preemption policy keeps. `make` builds one, with any options."""

    make: Callable[[], Any]

    def test_preempted_requests_go_on_where_they_were(self) -> None:
        serves(Plain, num_blocks=14, preemption=self.make)

    def test_its_victim_is_one_of_the_candidates_and_its_mode_is_a_mode(self) -> None:
        policy, seen = self.make(), []

        class Watch(Plain):
            def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
                for count in range(1, len(running) + 1):
                    seen.append(draft.victim(running[:count]))
                    assert seen[-1] in running[:count], f"{seen[-1]!r} is none of the candidates"
                for request in running:
                    mode = policy.mode(request, draft)
                    assert isinstance(mode, PreemptMode), f"its mode is {mode!r}"
                super().schedule(waiting, running, draft)

        serve_all(make_engine(Watch(), preemption=policy), ragged(3))
        assert seen

    def test_it_copes_with_a_host_memory_that_others_have_filled(self) -> None:
        class Everything(Plain):
            def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
                if len(running) > 3:  # all at once
                    for request in running[1:]:
                        draft.preempt(request)
                    draft.take(running[0])
                else:
                    super().schedule(waiting, running, draft)

        serves(Everything, num_blocks=60, preemption=self.make)

    def test_it_keeps_nothing_of_finished_requests(self) -> None:
        engine = make_engine(Plain(), num_blocks=14, preemption=self.make())
        asked = ragged(1)
        serve_all(engine, asked)
        found = [path for path in reachable(engine, {request.id for request in asked}) if path.startswith("_swapper")]
        assert not found, f"a request that ended is still held in {', '.join(found)}"


@dataclass
class Plain:
    """First come, first served; the preemption policy says who gives way."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        draft.run(running, limit=16)
        for request in waiting:
            if not draft.admit(request, 16):
                return


class Dice:
    """A preemption policy whose victims are thrown for."""

    def __init__(self, what: PreemptMode) -> None:
        self.what, self.dice = what, random.Random(0)
        self.num_host_blocks = 12

    def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        return self.dice.choice(candidates)

    def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
        return self.what


def ragged(seed: int, num: int = 12) -> list[Request]:
    """Requests of all lengths, some beginning alike, with priorities and labels."""
    dice = random.Random(seed)
    shared = [dice.randrange(900) for _ in range(9)]
    return [
        Request(
            f"request-{i}",
            shared[: dice.randrange(10)] + [dice.randrange(900) for _ in range(dice.randrange(1, 30))],
            Sampling(0, max_tokens=dice.randrange(1, 12)),
            priority=dice.randrange(3),
            labels={"tenant": "abc"[dice.randrange(3)]},
        )
        for i in range(num)
    ]


def serves(scheduler: Callable[[], Any], preemption: Callable[[], Any] | None = None, **options: Any) -> None:
    """Raises AssertionError unless each of several sets of requests gets its own tokens."""
    for seed in range(8):
        requests = ragged(seed)
        wanted = {r.id: continuation(r.tokens, r.sampling.max_tokens) for r in requests}
        policy = preemption() if preemption is not None else None
        clock = itertools.count(1.0, 0.01).__next__  # passes with every look at it, so that idling is found at once
        got = serve_all(make_engine(scheduler(), preemption=policy, clock=clock, **options), requests)
        assert got == wanted, "the tokens differ from those of each request alone"
