"""The engine on the fake model: right tokens whatever the policy, whole blocks whatever the fault."""

from __future__ import annotations

import itertools
import random

import pytest
from fickle import Fickle, alone, requests

from turnout.core import Finish, Request, Sampling
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import check_balance, continuation, make_engine, serve_all


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("preemption", [Recompute(), Swap(host_blocks=6), Swap(host_blocks=100), Swap(host_blocks=0)])
def test_a_fickle_scheduler_still_gives_every_request_its_own_tokens(seed: int, preemption: Recompute | Swap) -> None:
    asked = requests(seed)
    engine = make_engine(Fickle(seed), num_blocks=20, preemption=preemption)
    assert serve_all(engine, asked) == alone(asked)
    assert engine.stats.num_blocks_free == 20


@pytest.mark.parametrize(
    ("scheduler", "preemption"),
    [
        (FCFS(), Recompute()),
        (FCFS(), Swap(host_blocks=8)),
        (ChunkedPrefill(), Recompute()),
        (ChunkedPrefill(chunk=3, max_prefill_tokens=5), Swap(host_blocks=8)),
    ],
)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(14, 1), (14, 8), (20, 4), (200, 4)])
def test_every_composition_gives_the_same_tokens(
    scheduler: FCFS | ChunkedPrefill, preemption: Recompute | Swap, num_blocks: int, block_size: int
) -> None:
    asked = requests(7, num=16)
    engine = make_engine(
        scheduler, num_blocks=num_blocks * 4 // block_size, block_size=block_size, preemption=preemption
    )
    assert serve_all(engine, asked) == alone(asked)


@pytest.mark.parametrize(("budget", "seats"), [(1, 1), (2, 8), (7, 3), (64, 1), (64, 8)])
def test_budgets_hold_in_every_step(budget: int, seats: int) -> None:
    engine = make_engine(ChunkedPrefill(), max_num_batched_tokens=budget, max_num_seqs=seats, num_blocks=100)
    for request in requests(3):
        engine.add(request)
    while engine.busy:
        engine.step()
        assert len(engine.running) <= seats
    assert max(step.num_tokens for step in engine._runner.steps) <= budget  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_moment_leave_the_others_right_and_the_blocks_whole(seed: int) -> None:
    dice = random.Random(seed)
    asked = requests(seed)
    engine = make_engine(Fickle(seed), num_blocks=18, preemption=Swap(host_blocks=8))
    got: dict[str, list[int]] = {r.id: [] for r in asked}
    gone = set()
    for request in asked:
        engine.add(request)
    while engine.busy:
        for output in engine.step():
            got[output.request_id] += output.tokens
        if dice.random() < 0.2:
            victim = dice.choice(asked)
            engine.abort(victim.id)
            gone.add(victim.id)
        check_balance(engine)
    wanted = alone(asked)
    for request in asked:
        full = wanted[request.id]
        assert got[request.id] == (full if request.id not in gone else full[: len(got[request.id])])
    assert engine.stats.num_blocks_free == 18
    assert engine.stats.host_blocks_free == engine.stats.host_blocks


def test_a_request_that_can_never_fit_is_refused_at_once_with_both_numbers() -> None:
    engine = make_engine(FCFS(), num_blocks=4, block_size=4, max_model_len=100)
    with pytest.raises(ValueError, match="room for 17 tokens.* holds 16"):
        engine.add(Request("big", [1] * 8, Sampling(0, max_tokens=10)))
    with pytest.raises(ValueError, match="together 101, but the context length is 100"):
        engine.add(Request("long", [1] * 91, Sampling(0, max_tokens=10)))
    assert not engine.busy
    fits = Request("fits", [1] * 8, Sampling(0, max_tokens=9))
    assert serve_all(engine, [fits]) == {"fits": continuation([1] * 8, 9)}


def test_one_request_alone_may_fill_the_whole_cache() -> None:
    for length in range(1, 17):
        asked = [Request("a", list(range(length)), Sampling(0, max_tokens=17 - length))]
        assert serve_all(make_engine(FCFS(), num_blocks=4), asked) == alone(asked)


def test_ids_are_unique_while_in_use() -> None:
    engine = make_engine(FCFS())
    engine.add(Request("a", [1]))
    with pytest.raises(ValueError, match="already in use"):
        engine.add(Request("a", [2]))
    engine.abort("a")
    engine.add(Request("a", [2]))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        Request("a", [])


def test_stop_tokens_end_a_request_and_max_tokens_count_exactly_after_preemptions() -> None:
    prompt = [5, 6, 7]
    said = continuation(prompt, 20)
    stop = said[6]
    asked = [
        Request("stop", list(prompt), Sampling(0, max_tokens=20, stop_ids=frozenset({stop}))),
        Request("length", list(prompt), Sampling(0, max_tokens=20)),
    ]
    engine = make_engine(Fickle(3), num_blocks=12)
    finishes = {}
    for request in asked:
        engine.add(request)
    while engine.busy:
        finishes |= {o.request_id: o.finish for o in engine.step() if o.finish}
    assert finishes == {"stop": Finish.STOP, "length": Finish.LENGTH}
    assert asked[0].tokens[3:] == said[: said.index(stop) + 1]
    assert asked[1].tokens[3:] == said


@pytest.mark.parametrize("lengths", list(itertools.product([1, 5, 8, 9], [3, 16])))
def test_scoring_a_prompt_covers_every_token_once_whatever_was_cached_or_preempted(lengths: tuple[int, int]) -> None:
    num_prompt, chunk = lengths
    prompt = list(range(100, 100 + num_prompt))
    engine = make_engine(ChunkedPrefill(chunk=chunk), num_blocks=30)
    serve_all(engine, [Request("warm", list(prompt), Sampling(0, max_tokens=1))])
    request = Request("scored", list(prompt), Sampling(0, max_tokens=0, prompt_logprobs=0))
    engine.add(request)
    marks, finish = [], None
    while engine.busy:
        for output in engine.step():
            marks += [mark.token for mark in output.prompt_logprobs]
            assert output.tokens == ()
            finish = output.finish or finish
    assert marks == prompt[1:]
    assert finish is Finish.LENGTH


def test_a_failed_forward_pass_ends_its_requests_and_nobody_elses() -> None:
    engine = make_engine(FCFS(), max_num_seqs=2)
    asked = requests(5, num=4)
    real, failures = engine._runner.run, iter([False, True])

    def run(step):  # type: ignore[no-untyped-def]
        if next(failures, False):
            raise RuntimeError("device lost its mind")
        return real(step)

    engine._runner.run = run  # type: ignore[method-assign]
    got: dict[str, list[int]] = {r.id: [] for r in asked}
    errors = {}
    for request in asked:
        engine.add(request)
    while engine.busy:
        for output in engine.step():
            got[output.request_id] += output.tokens
            if output.error:
                errors[output.request_id] = output.error
        check_balance(engine)
    assert errors and all("device lost its mind" in e for e in errors.values())
    wanted = alone(asked)
    assert all(got[r.id] == wanted[r.id] for r in asked if r.id not in errors)
    assert len(errors) < 4


def test_an_engine_whose_every_step_fails_says_so_instead_of_limping_on() -> None:
    engine = make_engine(FCFS(), max_num_seqs=1)

    def run(step):  # type: ignore[no-untyped-def]
        raise RuntimeError("gone")

    engine._runner.run = run  # type: ignore[method-assign]
    for request in requests(5, num=6):
        engine.add(request)
    with pytest.raises(RuntimeError, match="gone"):
        while engine.busy:
            engine.step()


def test_leaving_generate_early_aborts_what_is_open() -> None:
    engine = make_engine(FCFS())
    outputs = engine.generate(requests(2))
    next(outputs)
    outputs.close()
    assert not engine.busy
    assert engine.stats.num_blocks_free == engine.info.num_blocks


def test_counters_tell_each_request_once_and_recomputed_tokens_are_no_prefix_hits() -> None:
    dice = random.Random(0)
    asked = [Request(str(i), [dice.randrange(900) for _ in range(20)], Sampling(0, max_tokens=8)) for i in range(8)]
    engine = make_engine(FCFS(), num_blocks=16)
    serve_all(engine, asked)
    stats = engine.stats
    assert stats.preemptions_recompute > 0 and stats.recomputed_tokens > 0
    assert stats.prompt_tokens == 8 * 20 and stats.cached_tokens == 0
    assert stats.generated_tokens == 8 * 8
    assert stats.finished == {"length": 8}


def test_a_request_that_names_itself_as_its_parent_is_refused() -> None:
    engine = make_engine(FCFS())
    with pytest.raises(ValueError, match="'a' names itself as its parent"):
        engine.add(Request("a", [1], parent="a"))
    assert not engine.busy


def test_a_child_whose_parent_is_aborted_or_fails_waits_for_no_later_request_of_that_id() -> None:
    engine, once = make_engine(FCFS()), Sampling(0, max_tokens=1)
    engine.add(Request("a", [1], once))
    engine.add(Request("b", [1], once, parent="a"))
    engine.abort("a")
    engine.add(Request("a", [1], once, parent="b"))  # else each would wait for the other
    ended = [output.request_id for _ in range(3) for output in engine.step()]

    real = engine._runner.run

    def run(step):  # type: ignore[no-untyped-def]
        engine._runner.run = real  # type: ignore[method-assign]
        raise RuntimeError("once")

    engine._runner.run = run  # type: ignore[method-assign]
    engine.add(Request("c", [1], once))
    engine.add(Request("d", [1], once, parent="c"))
    assert [output.request_id for output in engine.step()] == ["c"]
    engine.add(Request("c", [1], once, parent="d"))
    ended += [output.request_id for _ in range(3) for output in engine.step()]
    assert sorted(ended) == ["a", "b", "c", "d"] and not engine.busy
