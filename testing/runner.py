"""The contract of a runner as a suite to inherit: steps over a tiny model, held to what it says without a cache.

    class TestMine(RunnerContract):
        make = Mine

`turnout plugins check runner=mine` runs the same rules. The device is the CPU; attention is what `attention=torch` is.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any
from unittest import SkipTest

import torch

from turnout.compose.plugins import load
from turnout.core.model import Limits, ModelRunner
from turnout.core.optional import AsyncRunner
from turnout.core.types import PENDING, Chunk, KVSpec, ModelError, Move, Request, Result, Sampling, Step
from turnout.testing import toy_model
from turnout.testing.toy_model import MAX_LEN, VOCAB, ToyModel, greedy, logits_after

BLOCK, NUM_BLOCKS, NUM_HOST = 4, 40, 8
GREEDY = Sampling(temperature=0.0, max_tokens=32)
PROMPTS = ((7, 3, 9), tuple(range(1, 14)), (5,), (60, 2, 2, 8, 30, 11, 4, 4))


class Driven:
    """A started runner, and requests in blocks that lie anywhere in its cache."""

    def __init__(self, runner: ModelRunner, limits: Limits | None = None) -> None:
        self.model, self.runner = ToyModel(), runner
        limits = limits or Limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=MAX_LEN)
        self.attention: Any = load().get("attention", "torch").component()
        self.info = runner.prepare(toy_model.info(), limits, lambda stage, share: None)
        self.spec = KVSpec(self.info.layers, BLOCK, NUM_BLOCKS)
        self._free = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)

    def start(self) -> Driven:
        self.runner.start(self.model, self.attention, self.spec, torch.float32, self.info.device, NUM_HOST)
        return self

    def request(self, prompt: Sequence[int], sampling: Sampling = GREEDY, name: str = "") -> Request:
        made = Request(name or f"r{len(self._free)}", list(prompt), sampling)
        made.blocks.extend(self.take(-(-(len(prompt) + sampling.max_tokens) // BLOCK)))
        return made

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    @staticmethod
    def chunk(request: Request, count: int | None = None) -> Chunk:
        count = request.num_pending if count is None else count
        return Chunk(request, request.num_computed, count, count == request.num_pending)

    def run(self, *chunks: Chunk, **moves: Any) -> Result:
        """One step, after which requests are as the engine would leave them."""
        result = self.runner.run(Step(chunks, **moves))
        sampled = [chunk.request for chunk in chunks if chunk.samples]
        assert len(result.tokens) == len(sampled), f"{len(result.tokens)} tokens for {len(sampled)} chunks that sample"
        for request, count in ((chunk.request, chunk.num_tokens) for chunk in chunks):
            request.num_computed += count
        for request, token in zip(sampled, result.tokens, strict=True):
            request.tokens.append(token)
        return result

    def serve(self, request: Request, num_tokens: int) -> list[int]:
        while request.num_generated < num_tokens:
            self.run(self.chunk(request))
        return request.tokens[request.num_prompt :]

    def holds(self, request: Request, what: str) -> None:
        """Raises AssertionError unless a request has its own greedy tokens."""
        want = greedy(self.model, request.tokens[: request.num_prompt], request.num_generated)
        got = request.tokens[request.num_prompt :]
        assert got == want, f"{what}: the tokens are {got}, the model says {want}"


class Allowing:
    """A Constraint: the samples in `rows` may be one of `tokens`."""

    complete = ()

    def __init__(self, rows: tuple[int, ...], tokens: Sequence[int]) -> None:
        self.rows, self.sampled = rows, list[int]()
        self._bits = torch.zeros(len(rows), -(-VOCAB // 32), dtype=torch.int32)
        for token in tokens:
            self._bits[:, token // 32] |= 1 << token % 32

    def fill(self) -> torch.Tensor:
        return self._bits

    def take(self, tokens: Sequence[int], failed: Collection[int] = ()) -> None:
        self.sampled = list(tokens)

    def judged(self, result: Result) -> Result:
        return result


class RunnerContract:
    """What every runner keeps. `make` builds one, with any options."""

    make: Callable[[], Any]

    def driven(self) -> Driven:
        try:
            return Driven(self.make()).start()
        except ModelError as error:
            raise SkipTest(f"it can't run here: {error}") from None

    def test_a_prompt_and_its_decodes_get_the_tokens_the_model_says(self) -> None:
        driven = self.driven()
        for prompt in PROMPTS:
            request = driven.request(prompt, replace(GREEDY, max_tokens=6))
            driven.serve(request, 6)
            driven.holds(request, f"a prompt of {len(prompt)}")

    def test_a_prompt_in_chunks_is_the_whole_prompt(self) -> None:
        for sizes in ((1, 5, 7), (4, 4, 5), (12, 1)):
            driven = self.driven()
            request = driven.request(PROMPTS[1])
            for size in sizes:
                result = driven.run(driven.chunk(request, size))
                assert bool(result.tokens) == (request.num_generated == 1), "a chunk in the middle yields a token"
            driven.serve(request, 4)
            driven.holds(request, f"a prompt in chunks of {sizes}")

    def test_a_request_is_answered_alike_whoever_shares_its_steps(self) -> None:
        """Decodes, whole prompts and parts of prompts in one step, in any order."""
        driven, dice = self.driven(), random.Random(1)
        requests = [driven.request(prompt, replace(GREEDY, max_tokens=8)) for prompt in PROMPTS]
        while unfinished := [request for request in requests if request.num_generated < 5]:
            some = dice.sample(unfinished, dice.randint(1, len(unfinished)))
            driven.run(*(driven.chunk(r, dice.randint(1, r.num_pending)) for r in some))
        for request in requests:
            driven.holds(request, f"among others, {request.id}")

    def test_blocks_swapped_out_come_back_as_they_were(self) -> None:
        driven = self.driven()
        request, other = driven.request(PROMPTS[1], replace(GREEDY, max_tokens=3)), driven.request(PROMPTS[3])
        driven.serve(request, 1)
        host = range(NUM_HOST)[-len(request.blocks) :]
        out = tuple(Move(block, place) for block, place in zip(request.blocks, host, strict=True))
        given, request.blocks = request.blocks, array("i", driven.take(len(request.blocks)))
        other.blocks = given + other.blocks  # it is handed them in the same step, and writes into them
        driven.run(driven.chunk(other), swap_out=out)
        back = tuple(Move(place, block) for block, place in zip(request.blocks, host, strict=True))
        driven.run(driven.chunk(other), driven.chunk(request), swap_in=back)
        driven.serve(request, 3)
        driven.holds(request, "swapped out and in")
        driven.holds(other, "in the blocks of one swapped out")

    def test_a_copied_block_goes_on_by_itself(self) -> None:
        driven = self.driven()
        parent = driven.request(PROMPTS[3][:6], replace(GREEDY, max_tokens=4))
        driven.serve(parent, 1)
        child = driven.request([*PROMPTS[3][:6], 33], replace(GREEDY, max_tokens=4), "child")
        child.num_computed = 6
        copies = tuple(Move(*pair) for pair in zip(parent.blocks[:2], child.blocks[:2], strict=True))
        driven.run(driven.chunk(child), driven.chunk(parent), copies=copies)
        driven.serve(child, 3)
        driven.serve(parent, 3)
        driven.holds(child, "a copy")
        driven.holds(parent, "what was copied")

    def test_all_sources_of_a_copy_are_read_before_any_target_is_written(self) -> None:
        driven = self.driven()
        first, second = (driven.request(PROMPTS[i][:3], replace(GREEDY, max_tokens=4)) for i in (0, 3))
        driven.serve(first, 1), driven.serve(second, 1)
        one, two = first.blocks[0], second.blocks[0]
        first.blocks[0], second.blocks[0] = two, one
        driven.run(driven.chunk(first), driven.chunk(second), copies=(Move(one, two), Move(two, one)))
        driven.holds(first, "blocks that change places")
        driven.holds(second, "blocks that change places")

    def test_a_step_that_only_moves_gives_no_token(self) -> None:
        driven = self.driven()
        request = driven.request(PROMPTS[0])
        driven.serve(request, 1)
        result = driven.run(swap_out=(Move(request.blocks[0], 2),))
        assert not result.tokens and not result.errors
        request.blocks[0] = driven.take(1)[0]
        driven.run(swap_in=(Move(2, request.blocks[0]),))
        driven.serve(request, 3)
        driven.holds(request, "after a step that only moves")

    def test_log_probabilities_and_scores_are_the_models(self) -> None:
        driven = self.driven()
        asked = replace(GREEDY, logprobs=3, prompt_logprobs=2)
        request, other = driven.request(PROMPTS[1], asked), driven.request(PROMPTS[0])
        result = driven.run(driven.chunk(other), driven.chunk(request))
        wanted = logits_after(driven.model, PROMPTS[1]).log_softmax(-1)
        assert set(result.logprobs) == {1}, (
            f"log-probabilities are asked for by chunk 1, given for {set(result.logprobs)}"
        )
        found, scored = result.logprobs[1], result.scores.get(request.id, [])
        best = wanted[-1].topk(3)
        assert found.token == result.tokens[1] and found.rank == 1 and abs(found.logprob - best.values[0]) < 1e-4, found
        assert [token for token, _ in found.top] == best.indices.tolist(), f"the likeliest are {found.top}"
        assert [one.token for one in scored] == list(PROMPTS[1][1:]), "a score for each prompt token but the first"
        for place, one in enumerate(scored):
            off = abs(one.logprob - float(wanted[place, one.token]))
            assert off < 1e-4, f"the score of prompt token {place + 1} is off by {off:.2g}"

    def test_sampling_is_each_requests_own(self) -> None:
        """A seed gives the same tokens alone and among others; a banned token never comes; forced ones do."""
        warm = Sampling(temperature=1.5, seed=11, max_tokens=6)
        alone = self.driven()
        want = alone.serve(alone.request(PROMPTS[0], warm), 6)
        driven = self.driven()
        seeded = driven.request(PROMPTS[0], warm)
        likeliest = greedy(driven.model, PROMPTS[3], 1)[0]
        banned = driven.request(PROMPTS[3], replace(GREEDY, logit_bias={likeliest: -100.0}))
        forced = driven.request(PROMPTS[2], replace(GREEDY, forced=(4, 44, 14)))
        for _ in range(6):
            driven.run(*(driven.chunk(request) for request in (banned, seeded, forced)))
        assert seeded.tokens[3:] == want, f"a seeded request has {seeded.tokens[3:]} among others, {want} alone"
        assert banned.tokens[len(PROMPTS[3])] != likeliest, "a token with a bias of -100 was taken"
        assert forced.tokens[1:4] == [4, 44, 14], f"forced tokens came out as {forced.tokens[1:4]}"
        assert all(0 <= token < VOCAB for token in (*seeded.tokens, *banned.tokens)), "a token beyond the vocabulary"

    def test_a_constraint_holds_for_its_own_rows_and_is_told_what_was_sampled(self) -> None:
        driven = self.driven()
        free, formed = driven.request(PROMPTS[0]), driven.request(PROMPTS[3], replace(GREEDY, logprobs=1))
        likeliest = greedy(driven.model, PROMPTS[3], 1)[0]
        allowed = [token for token in (3, 5, 11) if token != likeliest]
        constraint = Allowing((1,), allowed)
        result = driven.run(driven.chunk(free), driven.chunk(formed), constraint=constraint)
        assert result.tokens[1] in allowed, f"{result.tokens[1]} was sampled, only {allowed} may be"
        assert constraint.sampled == result.tokens, (
            f"{result.tokens} were sampled, the constraint heard {constraint.sampled}"
        )
        driven.holds(free, "beside a row with a constraint")
        assert result.logprobs[1].top[0][0] == likeliest, "log-probabilities are not the model's own"

    def test_its_cache_fits_the_memory_and_no_more_than_can_be_filled(self) -> None:
        limits = Limits(max_num_batched_tokens=64, max_num_seqs=3, max_model_len=MAX_LEN)
        driven = Driven(self.make(), limits)
        found, note = driven.runner.room(driven.model, driven.attention, replace(driven.spec, num_blocks=1))
        most = 3 * -(-MAX_LEN // BLOCK)
        assert 0 < found <= most, f"{found} blocks, where 3 requests of {MAX_LEN} tokens fill {most}"
        assert note, "the note says by which rule"

    def test_a_step_submitted_behind_another_takes_its_tokens(self) -> None:
        driven = self.driven()
        if not isinstance(driven.runner, AsyncRunner):
            raise SkipTest("it computes no step ahead")
        requests = [driven.request(prompt, replace(GREEDY, max_tokens=6)) for prompt in PROMPTS[:2]]
        waiting = driven.runner.submit(Step(tuple(map(driven.chunk, requests))))
        if waiting is None:
            raise SkipTest("with its default options it computes no step ahead")
        for _ in range(4):
            for request in requests:
                request.num_computed = len(request.tokens)
                request.tokens.append(PENDING)
            ahead = driven.runner.submit(Step(tuple(map(driven.chunk, requests))))
            assert ahead is not None, "a step whose tokens are being computed is declined"
            for request, token in zip(requests, waiting.result(60).tokens, strict=True):
                request.tokens[-1] = token
            waiting = ahead
        waiting.result(60)
        for request in requests:
            driven.holds(request, "submitted ahead")
