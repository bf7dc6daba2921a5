"""Forks and the host tier on a model of transformers: equal to solo runs, and truly shared."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
from engines import engine_on, words

from turnout.core import Preemption, Request, Sampling
from turnout.plugins.blocks import PagedBlocks, RadixBlocks
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.quant.none import Unquantized
from turnout.testing import serve_all

MAKES: dict[str, Callable[[], PagedBlocks | RadixBlocks]] = {
    "paged": lambda: PagedBlocks(8, host_blocks=20),
    "radix": lambda: RadixBlocks(8, host_blocks=20),
}
makes = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = models.save("llama", tmp_path_factory.mktemp("llama"), vocab_size=1000)
    return load(inspect(str(folder), dtype="float32", device="cpu"), Unquantized())


def choices(prompt: list[int], num: int = 4) -> list[Request]:
    """`n=4` as the server asks for it: one request computes the prompt, the others are its children."""
    return [
        Request(str(i), list(prompt), Sampling(1.0, seed=i, max_tokens=20), parent="0" if i else None)
        for i in range(num)
    ]


def alone(model: Model, prompt: list[int]) -> dict[str, list[int]]:
    found = {}
    for request in choices(prompt):
        request.parent = None
        found |= serve_all(engine_on(model, block_size=8, prefix_cache=False), [request])
    return found


@makes
@pytest.mark.parametrize("length", [15, 16, 17, 24])
def test_seeded_choices_are_what_each_is_alone_and_share_every_full_block(
    model: Model, make: Callable[[], PagedBlocks], length: int
) -> None:
    prompt = words(length, seed=length)
    wanted = alone(model, prompt)
    assert len(set(map(tuple, wanted.values()))) == 4
    engine = engine_on(model, blocks=make(), block_size=8)
    asked = choices(prompt)
    for request in asked:
        engine.add(request)
    for _ in range(3):
        engine.step()
    full = (length - 1) // 8  # each computes the last token itself
    assert len({tuple(request.blocks[:full]) for request in asked}) == 1
    held = {block for request in asked for block in request.blocks}
    assert len(held) <= full + 4 * max(len(request.blocks) - full for request in asked)
    assert engine.stats.num_blocks - engine.stats.num_blocks_free == len(held)
    assert engine.stats.blocks.copied == 3 * bool((length - 1) % 8)
    while engine.busy:
        engine.step()
    assert {request.id: request.tokens[length:] for request in asked} == wanted
    assert engine.stats.num_blocks_free == engine.stats.num_blocks


@makes
@pytest.mark.parametrize("preemption", [Recompute(), Swap(40)], ids=["recompute", "swap"])
def test_choices_in_a_cache_too_small_for_all_of_them(
    model: Model, make: Callable[[], PagedBlocks], preemption: Preemption
) -> None:
    prompt = words(21, seed=5)
    engine = engine_on(model, blocks=make(), block_size=8, num_blocks=11, preemption=preemption)
    asked = choices(prompt)
    assert serve_all(engine, asked) == alone(model, prompt)
    assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap


@makes
def test_a_prefix_that_comes_back_from_host_memory_gives_the_same_answer(
    model: Model, make: Callable[[], PagedBlocks]
) -> None:
    prompt, other = words(40, seed=1), words(60, seed=2)
    engine = engine_on(model, blocks=make(), block_size=8, num_blocks=10)

    def answer(rid: str, tokens: list[int]) -> list[int]:
        return serve_all(engine, [Request(rid, list(tokens), Sampling(0, max_tokens=12))])[rid]

    cold = answer("cold", prompt)
    answer("other", other)  # takes the whole cache
    assert engine.stats.blocks.tier_out >= 5 and engine.stats.cached_tokens == 0
    assert answer("again", prompt) == cold
    assert engine.stats.blocks.tier_in >= 3 and engine.stats.cached_tokens >= 32
