"""Faults other engines had when requests are preempted, swapped, aborted or ranked: each trigger, with the right value."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import pytest
from callers import Api, live, until
from engines import LocalEngine, engine_on, makers, words
from grids import in_turn

from turnout.core import BlockManager, Draft, PreemptMode, Request, RequestView, Sampling, Scheduler
from turnout.core.engine import Engine
from turnout.plugins.loader.model import Model
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler.priority import Priority
from turnout.server.api.app import create_app
from turnout.server.config import ServerConfig
from turnout.server.text.tokenizer import Text
from turnout.testing import check_balance, continuation, make_engine, serve_all

T = TypeVar("T")
Make = Callable[[], T]
Http = Callable[[Engine], Api]

SCHEDULERS = makers("scheduler", chunk=5)
MANAGERS = makers("blocks", block_size=4)


class PreemptsAt:
    """Runs everything, but sends a request back once at each of the given lengths of its cache."""

    def __init__(self, lengths: Sequence[int], mode: PreemptMode) -> None:
        self.lengths, self.mode = lengths, mode
        self.left: dict[str, list[int]] = {}

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        for request in running:
            left = self.left.setdefault(request.id, list(self.lengths))
            if request.num_computed in left:
                left.remove(request.num_computed)
                draft.preempt(request, self.mode)
            else:
                draft.take(request)
        for request in waiting:
            if not draft.preempted:
                draft.take(request)


class TestPreemption:
    @pytest.mark.parametrize("mode", PreemptMode)
    @pytest.mark.parametrize("lengths", [[7], [8], [9], [4, 5, 8], [15, 16, 17], [5, 6, 7], []], ids=str)
    def test_at_a_block_edge_no_token_is_lost_or_repeated(self, lengths: list[int], mode: PreemptMode) -> None:
        engine = make_engine(PreemptsAt(lengths, mode), preemption=Swap(60))
        asked = [Request(str(i), words(n, seed=i), Sampling(0, max_tokens=64)) for i, n in enumerate((3, 4, 5))]
        wanted = {r.id: continuation(r.tokens, 64) for r in asked}
        assert serve_all(engine, asked) == wanted
        assert [(r.num_prompt, r.num_generated) for r in asked] == [(3, 64), (4, 64), (5, 64)]
        assert max(r.num_preemptions for r in asked) == len(lengths)

    @in_turn(scheduler=SCHEDULERS, host_blocks=[0, 1, 6, 100])
    def test_a_host_memory_of_any_size_only_decides_what_is_computed_again(
        self, scheduler: Make[Scheduler], host_blocks: int
    ) -> None:
        engine = make_engine(scheduler(), num_blocks=16, preemption=Swap(host_blocks))
        asked = [Request(str(i), words(17, seed=i), Sampling(0, max_tokens=12)) for i in range(12)]
        assert serve_all(engine, asked) == {r.id: continuation(r.tokens[:17], 12) for r in asked}
        stats = engine.stats
        assert stats.preemptions_recompute == stats.swap_fallbacks and stats.preemptions_swap + stats.swap_fallbacks > 0
        assert (stats.preemptions_swap > 0) is (host_blocks > 1)
        assert (stats.swap_fallbacks > 0) is (host_blocks <= 1) or host_blocks == 6
        assert stats.host_blocks_free == host_blocks

    @pytest.mark.parametrize("preemption", [Recompute(), Swap(30)], ids=["recompute", "swap"])
    def test_it_never_shows_in_what_clients_read(self, worded: Model, http: Http, preemption: Recompute | Swap) -> None:
        def calls(stream: bool) -> list[tuple[str, str, dict[str, Any]]]:
            body = {"max_tokens": 12, "temperature": 1, "ignore_eos": True, "stream": stream}
            if stream:
                body["stream_options"] = {"include_usage": True}
            prompts = [words(9 + i, seed=i) for i in range(16)]
            return [("POST", "/v1/completions", {"json": body | {"prompt": p, "seed": len(p)}}) for p in prompts]

        calm = [reply.good["choices"][0]["text"] for reply in http(engine_on(worded)).together(calls(False))]
        engine = engine_on(worded, num_blocks=8, prefix_cache=False, preemption=preemption)
        replies = http(engine).together([*calls(False), *calls(True)])
        assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap > 0
        assert [reply.good["choices"][0]["text"] for reply in replies[:16]] == calm
        assert [reply.text() for reply in replies[16:]] == calm
        for i, reply in enumerate(replies):
            usage = reply.good["usage"] if i < 16 else reply.chunks[-1]["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9 + i % 16, 12)
        assert engine.stats.num_blocks_free == 8


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_client_that_leaves_takes_all_its_choices_along(worded: Model, text: Text, n: int) -> None:
    engine = engine_on(worded, num_blocks=80)
    body = {"prompt": words(20), "n": n, "max_tokens": 230, "ignore_eos": True, "stream": True}
    with live(create_app(LocalEngine(engine), text, ServerConfig())) as url:
        for _ in range(2):
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
                next(reply.iter_lines())
                until(lambda: len(engine.running) == n)
            until(lambda: not engine.busy)
            assert engine.stats.num_running == engine.stats.num_waiting == 0
            assert engine.stats.num_blocks_free == 80
        assert httpx.post(
            f"{url}/v1/completions", json=body | {"max_tokens": 2, "stream": False}, timeout=30
        ).is_success


@dataclass
class Urgent:
    """The lowest `priority` first; who is more urgent takes the place of who is less."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        kept = sorted(running, key=lambda r: r.priority)
        coming = sorted(waiting, key=lambda r: r.priority)
        pool = sorted([*kept, *coming], key=lambda r: r.priority)
        for request in pool:
            while draft.tokens_left and not draft.take(request):
                victim = next((r for r in reversed(kept) if r.priority > request.priority and r is not request), None)
                if victim is None:
                    if request in kept:
                        draft.preempt(request)
                        kept.remove(request)
                    return
                draft.preempt(victim)
                kept.remove(victim)
                pool.remove(victim)


@pytest.mark.parametrize("ranked", [Priority(), Priority(ageing=None, chunk=5), Urgent()], ids=str)
class TestPriorities:
    """The scheduler of ours, and one as an author of a plugin might write it."""

    @pytest.mark.parametrize("seed", range(3))
    def test_the_budget_and_the_seats_hold_whoever_is_preempted(self, ranked: Scheduler, seed: int) -> None:
        dice = random.Random(seed)
        engine = make_engine(
            ranked, num_blocks=14, max_num_seqs=3, max_num_batched_tokens=20, preemption=Swap(dice.choice([0, 9]))
        )
        todo = [
            Request(
                str(i), words(dice.randint(1, 30), i), Sampling(0, max_tokens=dice.randint(1, 9)), priority=i * 7 % 5
            )
            for i in range(12)
        ]
        wanted = {r.id: continuation(r.tokens, r.sampling.max_tokens) for r in todo}
        got: dict[str, list[int]] = {r.id: [] for r in todo}
        while engine.busy or todo:
            if todo and dice.random() < 0.4:
                engine.add(todo.pop())
            for output in engine.step():
                got[output.request_id] += output.tokens
            check_balance(engine)
            assert len(engine.running) <= 3 and engine.stats.step_tokens <= 20
            step = engine._runner.steps[-1] if engine._runner.steps else None  # type: ignore[attr-defined]
            assert step is None or not {c.request.id for c in step.chunks} & {r.id for r in step.preempted}
        assert got == wanted

    def test_an_urgent_request_takes_a_seat_and_equals_never_push_each_other_out(self, ranked: Scheduler) -> None:
        engine = make_engine(ranked, num_blocks=40, max_num_seqs=2)
        slow = [Request(str(i), words(5, i), Sampling(0, max_tokens=30), priority=1) for i in range(4)]
        for request in slow:
            engine.add(request)
        for _ in range(3):
            engine.step()
        engine.add(urgent := Request("urgent", words(5, 9), Sampling(0, max_tokens=3)))
        engine.step()
        assert urgent.num_generated == 1 and not any(r.finish for r in slow)
        while engine.busy:
            engine.step()
        assert sum(r.num_preemptions for r in slow) == 1


@in_turn(scheduler=SCHEDULERS, blocks=MANAGERS, preemption=[Recompute(), Swap(7), Swap(7), Recompute()])
def test_the_books_balance_at_every_step_of_random_traffic(
    scheduler: Make[Scheduler], blocks: Make[BlockManager], preemption: Recompute | Swap
) -> None:
    """Some requests are children of others, as the choices of one answer are; some are aborted."""
    dice = random.Random(4)
    engine = make_engine(scheduler(), num_blocks=16, preemption=preemption, max_num_batched_tokens=24, blocks=blocks())
    shared, open_ids, got, prompts = words(20), list[str](), dict[str, list[int]](), list[list[int]]()
    wanted = {}
    for i in range(200):
        prompt = shared[: dice.randrange(20)] + words(dice.randint(1, 20), seed=i)
        parent = i - 1 - dice.randrange(3) if i and dice.random() < 0.3 else None
        if parent is not None and parent >= 0:
            prompt = [*prompts[parent], *words(dice.randrange(3), seed=i)]
        prompts.append(prompt)
        request = Request(str(i), list(prompt), Sampling(0, max_tokens=dice.randint(0, 9)), parent=str(parent))
        wanted[request.id], got[request.id] = continuation(prompt, request.sampling.max_tokens), []
        engine.add(request)
        open_ids.append(request.id)
        for _ in range(dice.randrange(3)):
            if dice.random() < 0.2:
                engine.abort(gone := dice.choice(open_ids))
                wanted[gone] = wanted[gone][: len(got[gone])]
            for output in engine.step():
                got[output.request_id] += output.tokens
            check_balance(engine)
        if i % 50 == 49:  # let it go idle
            while engine.busy:
                for output in engine.step():
                    got[output.request_id] += output.tokens
            assert engine.stats.num_blocks_free == 16
            assert engine.stats.host_blocks_free == engine.stats.host_blocks
    assert got == wanted
