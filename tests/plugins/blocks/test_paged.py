"""The block manager: prefixes found exactly, salts apart, eviction in order, counts whole."""

from __future__ import annotations

import random

import pytest

from turnout.core import Request, Sampling
from turnout.core.testing import continuation, make_engine, serve_all
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.scheduler import FCFS


def started(num_blocks: int = 16, block_size: int = 4, **options: bool) -> PagedBlocks:
    blocks = PagedBlocks(block_size, **options)
    blocks.start(num_blocks)
    return blocks


def computed(blocks: PagedBlocks, tokens: list[int], rid: str = "a", salt: str | None = None) -> Request:
    """A request whose tokens are all in the cache."""
    request = Request(rid, list(tokens), salt=salt)
    blocks.attach(request)
    assert blocks.grow(request, len(tokens))
    request.num_computed = len(tokens)
    blocks.publish(request)
    return request


@pytest.mark.parametrize("block_size", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_repeated_prompt_leaves_at_least_one_token_to_compute(block_size: int, num_blocks: int, off: int) -> None:
    length = block_size * num_blocks + off
    blocks = started(16, block_size)
    prompt = list(range(length))
    blocks.release(computed(blocks, prompt))
    again = Request("b", prompt)
    expected = (length - 1) // block_size * block_size
    assert blocks.cached(again) == expected
    blocks.attach(again)
    assert again.num_computed == expected < length


def test_a_hit_ends_where_the_prompts_part() -> None:
    blocks = started()
    computed(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert blocks.cached(Request("b", [1, 2, 3, 4, 5, 6, 7, 0, 9])) == 4
    assert blocks.cached(Request("b", [1, 2, 3, 0, 5, 6, 7, 8, 9])) == 0
    assert blocks.cached(Request("b", [5, 6, 7, 8, 9])) == 0  # the same block after another beginning


def test_salts_keep_tenants_apart_and_no_salt_equals_another_keys_value() -> None:
    blocks = started(64)
    prompt = list(range(9))
    salts: list[str | None] = [None, "", "a", "b", "0", "1", "None"]
    for i, salt in enumerate(salts):
        assert blocks.cached(Request("x", prompt, salt=salt)) == 0
        computed(blocks, prompt, rid=str(i), salt=salt)
        assert blocks.cached(Request("x", prompt, salt=salt)) == 8


def test_a_prefix_whose_beginning_was_evicted_is_not_found_by_its_tail() -> None:
    blocks = started(4)
    first = computed(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    blocks.release(first)
    other = Request("b", [9] * 12)
    assert blocks.grow(other, 12)  # takes the two blank blocks, then the tail
    assert blocks.cached(Request("c", [1, 2, 3, 4, 5, 6, 7, 8, 9])) == 4
    more = Request("d", [8] * 4)
    assert blocks.grow(more, 4)  # now the head is gone too
    assert blocks.cached(Request("c", [1, 2, 3, 4, 5, 6, 7, 8, 9])) == 0


def test_the_least_recently_released_prefix_goes_first() -> None:
    blocks = started(4)
    for rid, token in (("a", 1), ("b", 2), ("c", 3)):
        blocks.release(computed(blocks, [token] * 4, rid))
    touched = Request("d", [1] * 5)
    blocks.attach(touched)
    blocks.release(touched)  # 'a' was used again: 'b' is the oldest now
    assert blocks.grow(Request("e", [9] * 8), 8)  # one blank block, then one eviction
    assert [blocks.cached(Request("f", [t] * 5)) for t in (1, 2, 3)] == [4, 0, 4]


def test_growing_is_all_or_nothing() -> None:
    blocks = started(3)
    request = Request("a", list(range(20)))
    assert not blocks.grow(request, 13)
    assert not request.blocks and blocks.num_free == 3
    assert blocks.grow(request, 12) and blocks.num_free == 0


def test_releasing_twice_is_harmless() -> None:
    blocks = started(4)
    request = computed(blocks, list(range(8)))
    blocks.release(request)
    blocks.release(request)
    assert blocks.num_free == 4


def test_a_shared_block_is_freed_by_its_last_owner() -> None:
    blocks = started(4)
    first = computed(blocks, list(range(8)), "a")
    second = computed(blocks, list(range(8)) + [99], "b")
    assert second.blocks[:2] == first.blocks[:2]
    blocks.release(first)
    assert blocks.num_free == 1
    blocks.release(second)
    assert blocks.num_free == 4


def test_without_a_prefix_cache_nothing_is_found() -> None:
    blocks = started(4, prefix_cache=False)
    blocks.release(computed(blocks, list(range(8))))
    assert blocks.cached(Request("b", list(range(9)))) == 0


@pytest.mark.parametrize("seed", range(20))
def test_cold_and_cached_runs_agree_under_random_traffic(seed: int) -> None:
    dice = random.Random(seed)
    pool = [dice.randrange(900) for _ in range(40)]
    engine = make_engine(FCFS(), num_blocks=dice.choice([14, 30]), max_num_batched_tokens=32)
    for turn in range(6):
        asked = []
        for i in range(dice.randint(1, 5)):
            prompt = pool[: dice.randint(1, 40)] + [dice.randrange(900)] * dice.randint(0, 3)
            asked.append(Request(f"{turn}.{i}", prompt, Sampling(0, max_tokens=dice.randint(1, 9))))
        assert serve_all(engine, asked) == {
            r.id: continuation(r.tokens[: r.num_prompt], r.sampling.max_tokens) for r in asked
        }


@pytest.mark.parametrize(("option", "value"), [("block_size", 0), ("num_blocks", 0)])
def test_bad_options_name_the_option_the_rule_and_the_value(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"blocks.{option} must be at least 1.*got 0"):
        PagedBlocks(**{option: value})
