"""Managers, preemption and forks together in an engine: every request says what it would have said alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from grids import in_turn

from turnout.core import Finish, Preemption, Request, Sampling, Scheduler, Step
from turnout.core.engine import Engine
from turnout.core.model import Result
from turnout.plugins.blocks import PagedBlocks, RadixBlocks
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import TokenCacheRunner, check_balance, continuation, make_engine, serve_all

Manager = PagedBlocks | RadixBlocks
MAKES: dict[str, Callable[[], Manager]] = {
    "paged": lambda: PagedBlocks(4),
    "paged with a tier": lambda: PagedBlocks(4, host_blocks=9, eviction="fifo"),
    "radix": lambda: RadixBlocks(4, min_copied=1),
    "radix with a tier": lambda: RadixBlocks(4, min_copied=2, host_blocks=9, eviction="lfu"),
}
makes = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
preemptions = pytest.mark.parametrize("preemption", [Recompute(), Swap(6), Swap(60)], ids=str)
schedulers = pytest.mark.parametrize("scheduler", [FCFS(), ChunkedPrefill(chunk=5)], ids=["fcfs", "chunked_prefill"])


class Family:
    """Parents that are kept, children that begin as they do, and strangers, at random moments."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.dice = engine, random.Random(seed)
        self.stem = [self.dice.randrange(900) for _ in range(20)]
        self.asked: dict[str, Request] = {}
        self.said: dict[str, list[int]] = {}
        self.kept: list[str] = []

    def run(self, num: int = 14) -> None:
        """Raises AssertionError when a request says something else than alone, or blocks are lost."""
        dice, engine = self.dice, self.engine
        while len(self.asked) < num or engine.busy:
            if len(self.asked) < num and dice.random() < 0.4:
                self.ask()
            for output in engine.step():
                self.said[output.request_id] += output.tokens
            check_balance(engine)
            if self.kept and dice.random() < 0.05:
                engine.drop(dice.choice(self.kept))  # harmless where it still runs
                check_balance(engine)
        for rid in self.kept:
            engine.drop(rid)
        assert engine.stats.num_blocks_free == engine.info.num_blocks
        for request in self.whole():
            prompt, most = request.tokens[: request.num_prompt], request.sampling.max_tokens
            assert self.said[request.id] == continuation(prompt, most), request.id

    def whole(self) -> list[Request]:
        """Those that no failed step ended."""
        return [request for request in self.asked.values() if request.finish is not Finish.ERROR]

    def ask(self) -> None:
        dice = self.dice
        prompt = [*self.stem[: dice.randrange(21)], dice.randrange(900)]
        most = dice.randint(1, 9)
        self.add(
            parent := Request(
                f"{len(self.asked)}", list(prompt), Sampling(0, max_tokens=most), keep=dice.random() < 0.6
            )
        )
        if parent.keep:
            self.kept.append(parent.id)
        for _ in range(dice.choice((0, 0, 1, 4))):
            tokens = [
                *prompt,
                *continuation(prompt, dice.randrange(most)),
                *([dice.randrange(900)] * dice.randrange(2)),
            ]
            sampling = Sampling(0, max_tokens=dice.randint(1, 6))
            self.add(Request(f"{len(self.asked)} of {parent.id}", tokens, sampling, parent=parent.id))

    def add(self, request: Request) -> None:
        self.asked[request.id], self.said[request.id] = request, []
        self.engine.add(request)


@in_turn(
    make=MAKES,
    preemption=[Recompute(), Swap(6), Swap(60), Swap(6)],
    scheduler={"fcfs": FCFS(), "chunked_prefill": ChunkedPrefill(chunk=5)},
    num_blocks=[11, 11, 11, 11, 11, 11, 40, 40],
)
def test_families_say_what_each_would_say_alone(
    make: Callable[[], Manager], preemption: Preemption, scheduler: Scheduler, num_blocks: int
) -> None:
    copied = forked = preempted = 0
    for seed in range(4):
        manager = make()
        fork = manager.fork

        def counted(*args: Any, fork: Callable[..., None] = fork) -> None:
            nonlocal forked
            forked += 1
            fork(*args)

        manager.fork = counted  # type: ignore[method-assign]
        engine = make_engine(
            scheduler, num_blocks=num_blocks, blocks=manager, preemption=preemption, max_num_batched_tokens=40
        )
        Family(engine, seed).run()
        copied += engine.stats.blocks.copied
        preempted += engine.stats.preemptions_recompute + engine.stats.preemptions_swap
    assert forked > 5 and copied > 5
    assert preempted or num_blocks > 11


@makes
@pytest.mark.parametrize("seed", range(3))
def test_cold_and_cached_runs_agree_under_random_traffic(make: Callable[[], Manager], seed: int) -> None:
    dice = random.Random(seed)
    pool = [dice.randrange(900) for _ in range(40)]
    engine = make_engine(FCFS(), num_blocks=dice.choice([14, 30]), max_num_batched_tokens=32, blocks=make())
    for turn in range(6):
        asked = []
        for i in range(dice.randint(1, 5)):
            prompt = pool[: dice.randint(1, 40)] + [dice.randrange(900)] * dice.randint(0, 3)
            asked.append(Request(f"{turn}.{i}", prompt, Sampling(0, max_tokens=dice.randint(1, 9))))
        assert serve_all(engine, asked) == {
            r.id: continuation(r.tokens[: r.num_prompt], r.sampling.max_tokens) for r in asked
        }
    assert engine.stats.cached_tokens


@makes
@pytest.mark.parametrize("length", [7, 8, 9])
def test_n_choices_take_one_prompt_and_what_each_writes(make: Callable[[], Manager], length: int) -> None:
    engine = make_engine(FCFS(), blocks=make())
    prompt = [7 * i for i in range(length)]
    asked = [Request("0", prompt, Sampling(0, max_tokens=6))]
    asked += [Request(str(i), list(prompt), Sampling(0, max_tokens=6), parent="0") for i in range(1, 4)]
    for request in asked:
        engine.add(request)
    engine.step()
    engine.step()
    shared = (length - 1) // 4  # full blocks before the token that each computes itself
    assert len({tuple(request.blocks[:shared]) for request in asked}) == 1
    held = {block for request in asked for block in request.blocks}
    one_each = sum(len(request.blocks) for request in asked) - 3 * shared
    assert len(held) == one_each if isinstance(engine._blocks, PagedBlocks) else len(held) <= one_each  # twins merge
    while engine.busy:
        engine.step()
    assert engine.stats.num_blocks_free == 64


class Faulty(TokenCacheRunner):
    """Now and then breaks off, never three times in a row, and leaves poison where it was to write."""

    def __init__(self, like: TokenCacheRunner, seed: int) -> None:
        super().__init__(*like.cache.shape, len(like.host))
        self.dice, self.failures = random.Random(seed), 0

    def run(self, step: Step) -> Result:
        moving = bool(step.copies or step.swap_in or step.swap_out)
        if self.dice.random() > (0.3 if moving else 0.05) or self.steps and self.steps[-1] is None:
            return super().run(step)
        self.steps.append(None)  # type: ignore[arg-type]
        self.failures += 1
        for move in (*step.copies, *step.swap_in):
            self.cache[move.target] = -1
        for move in step.swap_out:
            self.host[move.target] = -2
        for request, start, count, _ in step.chunks:
            for position in range(start, start + count):
                self.cache[request.blocks[position // 4], position % 4] = -3
        raise RuntimeError("the device hiccuped")


@makes
@pytest.mark.parametrize("preemption", [Recompute(), Swap(20)], ids=["recompute", "swap"])
def test_a_step_that_fails_ends_its_own_requests_and_nobody_finds_what_it_left(
    make: Callable[[], Manager], preemption: Preemption
) -> None:
    failures = survivors = 0
    for seed in range(8):
        engine = make_engine(FCFS(), num_blocks=14, blocks=make(), preemption=preemption, max_num_batched_tokens=24)
        runner = engine._runner = Faulty(engine._runner, seed)  # type: ignore[arg-type]
        family = Family(engine, seed)
        family.run(20)
        failures += runner.failures
        survivors += len(family.whole())
    assert failures > 8 and survivors > 40


@pytest.mark.parametrize("make", [MAKES["paged with a tier"], MAKES["radix with a tier"]], ids=["paged", "radix"])
def test_a_step_undone_after_it_was_frozen_leaves_nothing_that_never_arrived(make: Callable[[], Manager]) -> None:
    engine = make_engine(FCFS(), num_blocks=4, blocks=make())
    prompt = list(range(12))
    serve_all(engine, [Request("first", list(prompt), Sampling(0, max_tokens=1))])
    serve_all(engine, [Request("other", [7] * 16, Sampling(0, max_tokens=0))])
    assert engine.stats.blocks.tier_out == 3
    engine.add(again := Request("again", [*prompt, 5], Sampling(0, max_tokens=1)))
    builder = engine._builder(1.0)
    assert builder.take(again.view) == 1 and builder.close().swap_in
    builder.undo()
    assert engine.stats.num_blocks_free == 4 and not again.blocks
    while engine.busy:
        engine.step()
    assert again.tokens[-1:] == continuation([*prompt, 5], 1)
