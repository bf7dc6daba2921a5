"""Faults other engines had with cached prefixes, sizes at an edge, chunks and choices: each trigger, with the right value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from callers import Api
from engines import backends, engine_on, makers, outputs_of, words
from grids import in_turn

from turnout.core import BlockManager, Preemption, Request, Sampling, Scheduler
from turnout.core.engine import Engine
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.loader.model import Model
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import check_balance, continuation, make_engine, serve_all

T = TypeVar("T")
Make = Callable[[], T]
Tiny = Callable[..., Model]
Http = Callable[[Engine], Api]

SCHEDULERS = makers("scheduler", chunk=5)
MANAGERS = makers("blocks", block_size=4)
managers = pytest.mark.parametrize("blocks", MANAGERS.values(), ids=MANAGERS)


def answer(engine: Engine, prompt: Sequence[int], **options: Any) -> tuple[list[int], Request]:
    """What the engine says to one prompt, and the request when it has ended."""
    request = Request("one", list(prompt), Sampling(**{"temperature": 0, "max_tokens": 6} | options))
    serve_all(engine, [request])
    return request.tokens[len(prompt) :], request


class TestPrefixCache:
    """The same prompts on a model of transformers, cold and cached: the answer is the same."""

    @backends
    @pytest.mark.parametrize("block_size", [8, 16, 32])
    def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(
        self, tiny: Tiny, attention: str, block_size: int
    ) -> None:
        engine = engine_on(tiny("llama", vocab_size=1000), attention=attention, block_size=block_size)
        for length in [k * block_size + off for k in (1, 2, 3) for off in (-1, 0, 1)]:
            prompt = words(length, seed=length)
            cold, first = answer(engine, prompt)
            warm, second = answer(engine, prompt)
            assert warm == cold and first.num_cached == 0
            assert second.num_cached == (length - 1) // block_size * block_size < length

    @backends
    @pytest.mark.parametrize("num_shared", [1, 2, 5, 7])
    def test_after_a_hit_exactly_the_rest_is_computed(self, tiny: Tiny, attention: str, num_shared: int) -> None:
        model = tiny("llama", vocab_size=1000)
        engine, cold = (engine_on(model, attention=attention, prefix_cache=cached) for cached in (True, False))
        shared = words(16 * num_shared)
        answer(engine, [*shared, *words(9, seed=1)])
        for rest in (1, 5, 15, 17):
            prompt = [*shared, *words(rest, seed=2)]
            request = Request("a", list(prompt), Sampling(0, max_tokens=6))
            engine.add(request)
            engine.step()
            assert (engine.stats.step_tokens, request.num_cached) == (rest, len(shared))
            while engine.busy:
                engine.step()
            assert request.tokens[len(prompt) :] == answer(cold, prompt)[0]

    def test_a_hit_found_while_waiting_is_looked_up_again_when_it_runs(self) -> None:
        engine = make_engine(FCFS(), num_blocks=10)
        prefix = words(12)
        answer(engine, [*prefix, 1])
        hog = Request("hog", words(16, seed=1), Sampling(0, max_tokens=24))
        late = Request("late", [*prefix, *words(20, seed=2)], Sampling(0, max_tokens=4))
        assert engine._blocks.cached(late) == 12
        got = serve_all(
            engine, [hog, late]
        )  # `late` does not fit beside `hog`, which takes the cached blocks meanwhile
        assert late.num_cached == 0
        assert got == {"hog": continuation(hog.tokens[:16], 24), "late": continuation(late.tokens[:32], 4)}

    @managers
    def test_over_http_only_the_same_salt_finds_a_prefix(
        self, worded: Model, http: Http, blocks: Make[BlockManager]
    ) -> None:
        api = http(engine_on(worded, blocks=blocks(), block_size=4, num_blocks=100))
        prompt = words(40)
        salts: list[dict[str, str]] = [{}, *({"cache_salt": salt} for salt in ("a", "b", "", "0", "None", "null"))]
        for expected in (0, 36):
            for salt in salts:
                usage = api.complete(prompt, max_tokens=1, **salt).good["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] == expected, salt

    @pytest.mark.parametrize("max_tokens", [0, 3])
    def test_log_probabilities_of_a_cached_prompt_are_whole_and_the_same(
        self, worded: Model, http: Http, max_tokens: int
    ) -> None:
        api = http(engine_on(worded, ChunkedPrefill(chunk=20)))
        prompt = words(55)
        fields = {"max_tokens": max_tokens, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "ignore_eos": True}
        first, *others = (api.complete(prompt, **fields).good["choices"][0] for _ in range(3))
        values = first["logprobs"]["token_logprobs"]
        assert len(values) == 55 + max_tokens and values[0] is None and None not in values[1:]
        assert len(first["prompt_logprobs"]) == 55 and first["prompt_logprobs"][0] is None
        for other in others:
            assert other["text"] == first["text"]
            assert other["logprobs"]["token_logprobs"][1:] == pytest.approx(values[1:], abs=1e-4)

    @backends
    def test_cold_and_cached_agree_in_their_log_probabilities(self, tiny: Tiny, attention: str) -> None:
        engine = engine_on(tiny("llama", vocab_size=1000), attention=attention)
        runs = []
        for rid in ("cold", "warm", "warm again"):
            request = Request(rid, words(70), Sampling(0, max_tokens=8, logprobs=5))
            marks = [mark for output in outputs_of(engine, [request])[rid] for mark in output.logprobs]
            runs.append([pair for mark in marks for pair in mark.top])
        assert request.num_cached == 64
        for run in runs[1:]:
            assert [token for token, _ in run] == [token for token, _ in runs[0]]
            assert [value for _, value in run] == pytest.approx([value for _, value in runs[0]], abs=1e-4)

    @backends
    def test_layers_with_a_window_reuse_all_but_the_last_block(self, tiny: Tiny, attention: str) -> None:
        model = tiny("mistral", vocab_size=1000, sliding_window=32)
        engine = engine_on(model, attention=attention)
        prompt = words(64)
        answer(engine, prompt)
        changed = [*prompt[:-3], 7, 8, 9]
        got, request = answer(engine, changed)
        assert request.num_cached == 48
        assert got == answer(engine_on(model, attention=attention, prefix_cache=False), changed)[0]

    @backends
    def test_answers_that_part_inside_a_shared_block_do_not_meet(self, tiny: Tiny, attention: str) -> None:
        model = tiny("llama", vocab_size=1000)
        prompt = words(20)  # a block and a quarter

        def request(seed: int, extra: Sequence[int] = ()) -> Request:
            return Request(f"{seed}", [*prompt, *extra], Sampling(1.0, seed=seed, max_tokens=20))

        def alone(asked: Request) -> list[int]:
            return serve_all(engine_on(model, attention=attention), [asked])[asked.id]

        wanted = {str(seed): alone(request(seed)) for seed in range(4)}
        wanted |= {str(seed): alone(request(seed, [seed])) for seed in (4, 5)}
        engine = engine_on(model, attention=attention)
        for _ in range(2):  # together, cold and then all on the cached block
            asked = [*(request(seed) for seed in range(4)), request(4, [4]), request(5, [5])]
            assert serve_all(engine, asked) == wanted

    @in_turn(scheduler=SCHEDULERS, case=["own salt", "no cache", "scored"])
    def test_a_request_that_shares_nothing_gets_through_in_chunks_all_the_same(
        self, scheduler: Make[Scheduler], case: str
    ) -> None:
        blocks = PagedBlocks(4, prefix_cache=case != "no cache")
        engine = make_engine(scheduler(), num_blocks=14, max_num_batched_tokens=5, blocks=blocks)
        asked = []
        for i in range(6):
            sampling = Sampling(0, max_tokens=3, prompt_logprobs=0 if case == "scored" else None)
            asked.append(Request(str(i), words(15), sampling, salt=str(i) if case == "own salt" else None))
        assert set(map(tuple, serve_all(engine, asked).values())) == {tuple(continuation(words(15), 3))}
        assert engine.stats.cached_tokens == 0


class TestLimits:
    """What can never fit is refused at once; whatever fits alone is served, in whatever company."""

    @in_turn(
        scheduler=SCHEDULERS,
        blocks=MANAGERS,
        preemption=[Recompute(), Swap(1), Swap(100)],
        num_blocks=[1, 3, 3, 3, 3, 1],
    )
    def test_whatever_fits_alone_is_served(
        self, scheduler: Make[Scheduler], blocks: Make[BlockManager], preemption: Preemption, num_blocks: int
    ) -> None:
        capacity = num_blocks * 4
        engine = make_engine(scheduler(), num_blocks=num_blocks, preemption=preemption, blocks=blocks())
        asked = []
        for length in range(1, capacity + 1):
            for most in {0, 1, capacity + 1 - length}:
                sampling = Sampling(0, max_tokens=most, prompt_logprobs=0 if length % 3 == 0 else None)
                asked.append(Request(f"{length} {most}", words(length, seed=length), sampling))
        wanted = {r.id: continuation(r.tokens, r.sampling.max_tokens) for r in asked}
        for length, most in ((capacity + 1, 0), (capacity + 1, 1), (capacity, 2), (1, capacity + 1)):
            room = max(length + most - 1, length)
            with pytest.raises(ValueError, match=f"room for {room} tokens, but .* holds {capacity} "):
                engine.add(Request("big", words(length), Sampling(0, max_tokens=most)))
        assert serve_all(engine, asked) == wanted

    def test_over_http_what_the_cache_cannot_hold_is_a_400_and_the_others_flow(self, worded: Model, http: Http) -> None:
        api = http(engine_on(worded, num_blocks=8))  # 128 tokens; the model could take 256
        short = ("POST", "/v1/completions", {"json": {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}})

        def large(prompt: int, most: int, **fields: object) -> tuple[str, str, dict[str, Any]]:
            return "POST", "/v1/completions", {"json": {"prompt": [5] * prompt, "max_tokens": most} | fields}

        scored = {"echo": True, "logprobs": 1}
        refused = [large(129, 0), large(129, 0, **scored), large(129, 1), large(128, 2), large(100, 60), large(255, 1)]
        replies = api.together([call for one in refused for call in (one, short)])
        assert [reply.status for reply in replies] == [400, 200] * len(refused)
        for reply in replies[::2]:
            assert reply.error["code"] == "context_length_exceeded" and "128" in reply.error["message"]
        assert api.complete([5] * 128, max_tokens=0, **scored).good["choices"][0]["finish_reason"] == "length"
        assert api.complete([5] * 128, max_tokens=1, ignore_eos=True).good["usage"]["completion_tokens"] == 1


class TestChunksAndChoices:
    @pytest.mark.parametrize("budget", [1, 7, 32, 1000])
    def test_a_prompt_in_chunks_gives_each_token_its_log_probability(
        self, worded: Model, http: Http, budget: int
    ) -> None:
        prompt, fields = words(100), {"max_tokens": 5, "logprobs": 3, "ignore_eos": True}
        whole = http(engine_on(worded)).complete(prompt, **fields).good["choices"][0]["logprobs"]
        engine = engine_on(worded, ChunkedPrefill(chunk=64), max_num_batched_tokens=budget)
        parts = [c["logprobs"] for c in http(engine).complete(prompt, **fields, stream=True).choices() if c["logprobs"]]
        assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
        values = [value for part in parts for value in part["token_logprobs"]]
        assert len(values) == 5 and values == pytest.approx(whole["token_logprobs"], abs=1e-4)
        assert [set(top) for part in parts for top in part["top_logprobs"]] == [set(t) for t in whole["top_logprobs"]]

    @managers
    @pytest.mark.parametrize("length", [16, 20])
    def test_each_of_several_choices_is_what_it_is_alone(
        self, worded: Model, http: Http, blocks: Make[BlockManager], length: int
    ) -> None:
        fields: dict[str, Any] = {"temperature": 1, "max_tokens": 20, "ignore_eos": True}
        prompt = words(length)
        alone = [
            http(engine_on(worded, block_size=4)).complete(prompt, **fields, seed=7 + i).good["choices"][0]["text"]
            for i in range(4)
        ]
        engine = engine_on(worded, block_size=4, blocks=blocks())
        for _ in range(2):
            reply = http(engine).complete(prompt, **fields, seed=7, n=4).good
            assert [choice["text"] for choice in reply["choices"]] == alone
            check_balance(engine)
        assert engine.stats.num_blocks_free == engine.info.num_blocks

    def test_seeded_choices_differ_repeat_and_end_each_on_its_own(self, worded: Model, http: Http) -> None:
        api = http(engine_on(worded))
        fields: dict[str, Any] = {"n": 4, "seed": 7, "temperature": 1, "max_tokens": 16, "ignore_eos": True}
        texts = [choice["text"] for choice in api.complete("The sea is", **fields).good["choices"]]
        assert len(set(texts)) == 4
        assert texts == [choice["text"] for choice in api.complete("The sea is", **fields).good["choices"]]
        fields["stop"] = [texts[1][20:26], texts[2][40:46]]  # ends the second and the third early
        cut = [min([text.find(stop) for stop in fields["stop"] if stop in text], default=None) for text in texts]
        assert cut[0] is cut[3] is None and cut[1] is not None and cut[2] is not None
        wanted = [(text[:end], "length" if end is None else "stop") for text, end in zip(texts, cut, strict=True)]
        whole, stream = api.complete("The sea is", **fields).good, api.complete("The sea is", **fields, stream=True)
        assert [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]] == wanted
        for index, end in enumerate(wanted):
            reasons = [c["finish_reason"] for c in stream.choices(index) if c["finish_reason"]]
            assert (stream.text(index), reasons) == (end[0], [end[1]])
