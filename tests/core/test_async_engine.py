"""A runner that computes behind the engine's back: the same tokens, whatever ends, is preempted or fails meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from engines import makers
from fickle import Fickle, alone, requests
from grids import in_turn
from virtual import Clock

from turnout.core import PENDING, ContractError, Draft, Finish, Request, RequestView, Sampling, Step
from turnout.core.engine import Engine
from turnout.core.model import Result
from turnout.core.types import Chunk, Output
from turnout.plugins.blocks import PagedBlocks, RadixBlocks
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import continuation, make_engine, serve_all
from turnout.testing.fake import TokenCacheRunner


class Late(Future[Result]):
    """Is computed when somebody waits for it: as late as can be."""

    def __init__(self, compute: Callable[[], None]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> Result:
        self._compute()
        return super().result(timeout)


class Behind(TokenCacheRunner):
    """The fake model, computing copies of what it was told, one step behind."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks)
        self._queue: deque[tuple[Step, Late]] = deque()
        self._last: dict[str, int] = {}
        self.fails = 0  # this many steps from now fail
        self.num_submitted = 0

    def submit(self, step: Step) -> Future[Result] | None:
        if not step.chunks or step.swap_out or step.copies or step.swap_in:
            return None
        if any(c.request.sampling.prompt_logprobs is not None for c in step.chunks):
            return None
        self.num_submitted += 1
        future = Late(self._drain)
        self._queue.append((replace(step, chunks=tuple(map(_copied, step.chunks))), future))
        return future

    def run(self, step: Step) -> Result:
        self._drain()
        assert not any(PENDING in c.request.tokens for c in step.chunks)
        return self._computed(step)

    def _drain(self) -> None:
        while self._queue:
            step, future = self._queue.popleft()
            for chunk in step.chunks:
                if chunk.request.tokens[-1] == PENDING:
                    chunk.request.tokens[-1] = self._last.get(chunk.request.id, 0)
            try:
                result = self._computed(step)
            except RuntimeError as error:
                future.set_exception(error)
                continue
            sampled = [c.request.id for c in step.chunks if c.samples]
            self._last = dict(zip(sampled, result.tokens, strict=True))
            future.set_result(result)

    def _computed(self, step: Step) -> Result:
        self.fails -= 1
        if self.fails == 0:
            raise RuntimeError("the device is gone")
        return super().run(step)


def _copied(chunk: Chunk) -> Chunk:
    request = chunk.request
    copy = Request(request.id, list(request.tokens), request.sampling)
    copy.num_prompt, copy.blocks, copy.num_scored = request.num_prompt, request.blocks[:], request.num_scored
    return chunk._replace(request=copy)


def behind(scheduler: Any, num_blocks: int = 64, block_size: int = 4, **options: Any) -> tuple[Engine, Behind]:
    engine = make_engine(scheduler, num_blocks=num_blocks, block_size=block_size, runner=Behind, **options)
    runner: Any = engine._runner
    return engine, runner


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("preemption", [Recompute(), Swap(host_blocks=6), Swap(host_blocks=100)])
def test_a_fickle_scheduler_still_gives_every_request_its_own_tokens(seed: int, preemption: Any) -> None:
    asked = requests(seed)
    engine, runner = behind(Fickle(seed), num_blocks=20, preemption=preemption)
    assert serve_all(engine, asked) == alone(asked)
    assert engine.stats.num_blocks_free == 20 and runner.num_submitted > 5


@in_turn(
    scheduler=makers("scheduler"),
    num_blocks=[14, 14, 20, 200],
    block_size=[8, 1, 4, 4],
    manager=[PagedBlocks, RadixBlocks, RadixBlocks, PagedBlocks],
)
def test_every_composition_gives_the_same_tokens(
    num_blocks: int, block_size: int, manager: Any, scheduler: Any
) -> None:
    asked = requests(7, num=16)
    engine, runner = behind(
        scheduler(),
        num_blocks=num_blocks * 4 // block_size,
        block_size=block_size,
        blocks=manager(block_size),
    )
    assert serve_all(engine, asked) == alone(asked)
    assert engine.stats.num_blocks_free == num_blocks * 4 // block_size and runner.num_submitted


def outputs_of(engine: Engine, asked: Sequence[Request]) -> dict[str, list[Output]]:
    found: dict[str, list[Output]] = {r.id: [] for r in asked}
    for output in engine.generate(asked):
        found[output.request_id].append(output)
    return found


def test_what_is_computed_for_a_request_that_stopped_is_thrown_away() -> None:
    prompt = [5, 6, 7]
    said = continuation(prompt, 4)
    engine, runner = behind(FCFS())
    asked = [
        Request("stops", list(prompt), Sampling(0, max_tokens=9, stop_ids=frozenset({said[2]}))),
        Request("goes on", [1, 2], Sampling(0, max_tokens=9)),
    ]
    found = outputs_of(engine, asked)
    assert [t for o in found["stops"] for t in o.tokens] == said[:3] and found["stops"][-1].finish is Finish.STOP
    assert [t for o in found["goes on"] for t in o.tokens] == continuation([1, 2], 9)
    assert asked[0].tokens == prompt + said[:3] and engine.stats.generated_tokens == 12
    submitted = [sorted(c.request.id for c in step.chunks) for step in runner.steps]
    assert submitted[3] == ["goes on", "stops"] and submitted[4] == ["goes on"]


def test_nothing_is_computed_beyond_the_tokens_asked_for() -> None:
    engine, runner = behind(FCFS())
    asked = [Request(str(n), [n, 1], Sampling(0, max_tokens=n)) for n in range(4)]
    found = outputs_of(engine, asked)
    assert [[t for o in found[str(n)] for t in o.tokens] for n in range(4)] == [
        continuation([n, 1], n) for n in range(4)
    ]
    counts = [
        sum(c.num_tokens for step in runner.steps for c in step.chunks if c.request.id == str(n)) for n in range(4)
    ]
    assert counts == [2, 2, 3, 4]


def test_a_step_is_returned_when_the_next_was_handed_over() -> None:
    engine, runner = behind(FCFS())
    engine.add(Request("a", [1, 2], Sampling(0, max_tokens=3)))
    assert engine.step() == [] and runner.steps == []
    (first,) = engine.step()
    assert first.tokens == tuple(continuation([1, 2], 1)) and runner.num_submitted == 2


def test_an_abort_in_flight_gives_the_blocks_back_and_shows_no_unknown_token() -> None:
    engine, _ = behind(FCFS(), num_blocks=4, block_size=4)
    request = Request("gone", [1, 2, 3], Sampling(0, max_tokens=8))
    engine.add(request)
    engine.step()
    engine.abort("gone")
    assert PENDING not in request.tokens and engine.stats.num_blocks_free == 4
    assert engine.step() == [] and not engine.busy
    asked = [Request("next", [9, 8, 7, 6], Sampling(0, max_tokens=6))]
    assert serve_all(engine, asked) == alone(asked)


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_failed_step_ends_those_in_it_and_in_the_one_behind_it_and_nobody_else(fails: int) -> None:
    engine, runner = behind(FCFS(), num_blocks=40, max_num_seqs=2)
    asked = [Request(str(n), [n, 1, 2], Sampling(0, max_tokens=6)) for n in range(6)]
    runner.fails = fails
    found = outputs_of(engine, asked)
    ended = {rid: outputs[-1].finish for rid, outputs in found.items()}
    assert [ended[str(n)] for n in range(6)] == [Finish.ERROR] * 2 + [Finish.LENGTH] * 4
    for n in range(2, 6):
        assert [t for o in found[str(n)] for t in o.tokens] == continuation([n, 1, 2], 6)
    assert all(PENDING not in r.tokens for r in asked) and engine.stats.num_blocks_free == 40


def test_a_request_the_runner_declines_waits_for_its_token() -> None:
    """Scores need what is known on the host: such a step is run alone, between others."""
    engine, _ = behind(FCFS(), max_num_batched_tokens=5)
    asked = [
        Request("plain", [1, 2, 3], Sampling(0, max_tokens=12)),
        Request("scored", list(range(12)), Sampling(0, max_tokens=5, prompt_logprobs=0)),
    ]
    found = outputs_of(engine, asked)
    assert {r: [t for o in outs for t in o.tokens] for r, outs in found.items()} == alone(asked)
    assert [m.token for o in found["scored"] for m in o.prompt_logprobs] == list(range(1, 12))


def test_children_wait_for_a_token_that_is_known_or_begin_in_order_behind_it() -> None:
    engine, _ = behind(FCFS(), blocks=PagedBlocks(4))
    prompt = list(range(10))
    asked = [Request("p", list(prompt), Sampling(0, max_tokens=4))]
    asked += [Request(f"c{n}", list(prompt), Sampling(0, max_tokens=5), parent="p") for n in range(3)]
    assert serve_all(engine, asked) == alone(asked)


def test_a_scheduler_that_breaks_a_rule_with_a_step_in_flight_loses_nothing() -> None:
    class Faulty(ChunkedPrefill):
        calls = 0

        def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
            super().schedule(waiting, running, draft)
            self.calls += 1
            if self.calls % 3 == 0:
                draft.take(Request("stranger", [1]))

    engine, _ = behind(Faulty(), num_blocks=40)
    asked = requests(3)
    for request in asked:
        engine.add(request)
    found: dict[str, list[int]] = {r.id: [] for r in asked}
    broken = 0
    while engine.busy:
        try:
            for output in engine.step():
                found[output.request_id] += output.tokens
        except ContractError as error:
            assert "no such request" in str(error)
            broken += 1
    assert found == alone(asked) and broken > 3


def test_nothing_stays_in_flight_when_nobody_is_left_and_idle_time_is_no_steps() -> None:
    prompt, clock = [5, 6, 7], Clock()
    stop = continuation(prompt, 3)[-1]
    engine, runner = behind(FCFS(), clock=clock)
    engine.add(Request("a", list(prompt), Sampling(0, max_tokens=50, stop_ids=frozenset({stop}))))
    while engine.busy:
        engine.step()
        clock.now += 0.01
    assert runner.num_submitted == 4, "one step is computed for nobody"
    assert engine.stats.num_blocks_free == engine.info.num_blocks and engine.stats.num_steps == 4
    clock.now += 3600
    engine.add(Request("b", [1, 2, 3], Sampling(0, max_tokens=2)))
    while engine.busy:
        engine.step()
        assert engine.stats.step_seconds < 1
        clock.now += 0.01


def test_ending_everybody_ends_those_in_flight_too() -> None:
    engine, _ = behind(FCFS(), max_num_seqs=2)
    asked = requests(1, num=4, max_tokens=9)
    for request in asked:
        engine.add(request)
    engine.step()
    outputs = engine.fail("enough")
    ended = {output.request_id: output.error for output in outputs if output.finish is Finish.ERROR}
    assert ended == {request.id: "enough" for request in asked if request.finish is Finish.ERROR}
    assert not engine.busy and engine.stats.num_blocks_free == 64
    assert all(PENDING not in request.tokens for request in asked)
