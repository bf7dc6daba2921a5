"""Faults other engines had where requests meet: in a batch, in blocks used again, on a shared prefix, between chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import backends, engine_on, outputs_of, words

from turnout.core import Request, Sampling
from turnout.core.model import Logprobs
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import serve_all

Tiny = Callable[..., Model]


@backends
def test_what_a_request_that_failed_left_in_its_blocks_reaches_nobody(tiny: Tiny, attention: str) -> None:
    """Token 77 makes NaN out of everything that sees it."""
    model = load(inspect(tiny("llama").info.path, dtype="float32", device="cpu"), Unquantized())
    with torch.inference_mode():
        embedding = next(m for m in model._net.modules() if isinstance(m, torch.nn.Embedding))
        embedding.weight[77] = math.nan
    good = [words(n, seed=n, below=60) for n in (3, 9, 20, 33, 18, 5)]

    def asked() -> list[Request]:
        return [Request(str(i), list(p), Sampling(0, max_tokens=6, logit_bias={77: -100})) for i, p in enumerate(good)]

    options: dict[str, Any] = {"attention": attention, "block_size": 8, "num_blocks": 24}
    alone = {r.id: serve_all(engine_on(model, **options), [r])[r.id] for r in asked()}
    engine = engine_on(model, **options)
    for _ in range(3):
        bad = [Request(f"bad{i}", [*words(n, seed=n, below=60), 77, 5], Sampling(0)) for i, n in enumerate((1, 30))]
        found = outputs_of(engine, [bad[0], *asked(), bad[1]])
        assert all("NaN" in str(found[r.id][-1].error) for r in bad)
        assert {rid: [t for o in said for t in o.tokens] for rid, said in found.items() if rid in alone} == alone
    assert engine.stats.generated_tokens == 3 * 6 * len(good)


@backends
@pytest.mark.parametrize("scheduler", [FCFS(), ChunkedPrefill(chunk=6)], ids=["fcfs", "chunked_prefill"])
def test_a_request_says_the_same_alone_and_among_others(
    tiny: Tiny, attention: str, scheduler: FCFS | ChunkedPrefill
) -> None:
    model = tiny("llama", vocab_size=1000)
    prompts = [words(n, seed=n) for n in (20, 3, 1, 17, 40, 8, 20, 66)]

    def run(count: int, order: int = 1) -> dict[str, list[tuple[int, float]]]:
        asked = [Request(str(i), list(prompts[i]), Sampling(0, max_tokens=8, logprobs=0)) for i in range(count)]
        found = outputs_of(engine_on(model, scheduler, attention=attention), asked[::order])
        return {rid: [(m.token, m.logprob) for o in said for m in o.logprobs] for rid, said in found.items()}

    alone = run(1)["0"]
    for other in (run(2), run(8), run(8, -1)):
        assert [token for token, _ in other["0"]] == [token for token, _ in alone]
        assert [value for _, value in other["0"]] == pytest.approx([value for _, value in alone], abs=1e-4)


@backends
def test_many_requests_on_one_long_prefix_answer_as_without_sharing(tiny: Tiny, attention: str) -> None:
    model = tiny("llama", vocab_size=1000, max_position_embeddings=512)
    prefix = words(256)
    prompts = [prefix + words(i % 5, seed=i) for i in range(16)]

    def run(prefix_cache: bool) -> list[list[int]]:
        asked = [Request(str(i), list(p), Sampling(0, max_tokens=6)) for i, p in enumerate(prompts)]
        engine = engine_on(
            model, attention=attention, num_blocks=320, prefix_cache=prefix_cache, max_num_batched_tokens=600
        )
        said = list(serve_all(engine, asked).values())
        assert (engine.stats.cached_tokens > 3000) is prefix_cache
        return said

    assert run(True) == run(False)


@backends
@pytest.mark.parametrize("chunk", [1, 16, 31, 32, 33])
def test_a_prompt_in_chunks_has_the_scores_of_the_whole(tiny: Tiny, attention: str, chunk: int) -> None:
    model = tiny("llama", vocab_size=1000)

    def scores(scheduler: FCFS | ChunkedPrefill) -> list[float]:
        request = Request("a", words(100), Sampling(0, max_tokens=3, prompt_logprobs=0, logprobs=0))
        said = outputs_of(engine_on(model, scheduler, attention=attention), [request])["a"]
        return [mark.logprob for output in said for mark in (*output.prompt_logprobs, *output.logprobs)]

    whole = scores(FCFS())
    assert len(whole) == 99 + 3
    assert scores(ChunkedPrefill(chunk=chunk)) == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("scheduler", [FCFS(), ChunkedPrefill(chunk=6)], ids=["fcfs", "chunked_prefill"])
def test_in_bfloat16_answers_part_only_where_two_tokens_are_about_as_likely(
    tiny: Tiny, scheduler: FCFS | ChunkedPrefill
) -> None:
    """The tolerance is 0.1 on log-probabilities; 0.03 was seen."""
    model = load(inspect(tiny("llama", vocab_size=1000).info.path, dtype="bfloat16", device="cpu"), Unquantized())
    prompts = [words(n, seed=n) for n in (20, 3, 1, 17, 40, 8, 21, 66)]

    def run(*which: int) -> dict[str, list[Logprobs]]:
        asked = [Request(str(i), list(prompts[i]), Sampling(0, max_tokens=16, logprobs=5)) for i in which]
        found = outputs_of(engine_on(model, scheduler), asked)
        return {rid: [mark for output in said for mark in output.logprobs] for rid, said in found.items()}

    together = run(*range(8))
    for i in range(8):
        for alone, among in zip(run(i)[str(i)], together[str(i)], strict=True):
            if alone.token != among.token:
                (_, best), (second, other) = alone.top[:2]
                assert second == among.token and best - other < 0.1
                break  # what follows has another beginning
            others = dict(among.top)
            assert all(abs(value - others[token]) < 0.1 for token, value in alone.top if token in others)
