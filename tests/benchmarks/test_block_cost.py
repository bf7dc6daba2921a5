"""What block managers cost: growing in every step, finding a prefix, taking and giving back blocks. Run with `make bench`;
times are shown, never asserted."""

from __future__ import annotations

import random
from typing import Any

import pytest

from turnout.core import Request
from turnout.plugins.blocks import PagedBlocks, RadixBlocks

pytestmark = pytest.mark.slow

SIZE = 16
Manager = PagedBlocks | RadixBlocks
managers = pytest.mark.parametrize("manager", [PagedBlocks, RadixBlocks], ids=["paged", "radix"])


def tokens(num: int) -> list[int]:
    dice = random.Random(0)
    return [dice.randrange(50_000) for _ in range(num)]


def started(manager: type[Manager], num_blocks: int, **options: Any) -> Manager:
    blocks = manager(SIZE, **options)
    blocks.start(num_blocks)
    return blocks


def filled(manager: type[Manager], num_tokens: int, **options: Any) -> tuple[Manager, Request]:
    """A manager that knows one prompt, and the request that computed it."""
    blocks = started(manager, 1_000, **options)
    first = Request("first", tokens(num_tokens + 1))
    blocks.attach(first)
    assert blocks.grow(first, num_tokens + 1)
    first.num_computed = num_tokens + 1
    blocks.publish(first)
    return blocks, first


@pytest.mark.benchmark(group="grow, 1,024 running requests")
@managers
def test_cost_of_growing_by_a_token(benchmark: Any, manager: type[Manager]) -> None:
    blocks = started(manager, 10_000)
    running = [Request(str(i), [7] * 100) for i in range(1024)]
    for request in running:
        blocks.attach(request)
        assert blocks.grow(request, 112)
        request.num_computed = 100
    benchmark(lambda: [blocks.grow(request, 101) for request in running])
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_request"] = benchmark.stats["median"] * 1e6 / 1024


@pytest.mark.benchmark(group="prefix lookup")
@managers
@pytest.mark.parametrize("num_tokens", [100, 1_000, 8_000])
def test_cost_of_a_prefix_lookup(benchmark: Any, manager: type[Manager], num_tokens: int) -> None:
    blocks, first = filled(manager, num_tokens)
    found = benchmark(blocks.cached, Request("second", list(first.tokens)))
    assert found >= num_tokens // SIZE * SIZE
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_block"] = benchmark.stats["median"] * 1e6 / (num_tokens // SIZE)


@pytest.mark.benchmark(group="prefix lookup")
@managers
def test_cost_of_a_lookup_of_8000_tokens_that_finds_nothing(benchmark: Any, manager: type[Manager]) -> None:
    blocks, _ = filled(manager, 8_000)
    assert benchmark(blocks.cached, Request("stranger", [1, 2, 3] * 2_700)) == 0


@pytest.mark.benchmark(group="prefix lookup")
def test_cost_of_plain_dictionary_lookups_for_8000_tokens(benchmark: Any) -> None:
    """The yardstick: 500 lookups of ready-made keys."""
    keys = [(i, i.to_bytes(64, "little")) for i in range(500)]
    table = {key: i for i, key in enumerate(keys)}
    benchmark(lambda: [table[key] for key in keys])


@pytest.mark.benchmark(group="a hit of 500 blocks, taken and given back")
@managers
@pytest.mark.parametrize("held", [True, False], ids=["held by another", "idle"])
def test_cost_of_a_hit(benchmark: Any, manager: type[Manager], held: bool) -> None:
    blocks, first = filled(manager, 8_000)
    second = Request("second", list(first.tokens))
    if not held:
        blocks.release(first)

    def hit() -> None:
        blocks.attach(second)
        blocks.release(second)

    benchmark(hit)
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_block"] = benchmark.stats["median"] * 1e6 / 500


@pytest.mark.benchmark(group="500 new blocks published, evicted by the next")
@managers
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("host_blocks", [0, 2_000])
def test_cost_of_a_prompt_that_makes_others_give_way(
    benchmark: Any, manager: type[Manager], eviction: str, host_blocks: int
) -> None:
    blocks, _ = filled(manager, 100, eviction=eviction, host_blocks=host_blocks)
    prompts = iter(range(1_000_000))

    def serve() -> None:
        request = Request("new", [next(prompts)] * 8_000)
        blocks.begin(0.0)
        blocks.attach(request)
        assert blocks.grow(request, 8_000)
        blocks.moves()
        blocks.settle(True)
        request.num_computed = 8_000
        blocks.publish(request)
        blocks.release(request)

    benchmark.pedantic(serve, rounds=40, warmup_rounds=5)
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_block"] = benchmark.stats["median"] * 1e6 / 500
