"""The default manager: single blocks found by exact keys, numbers given once."""

from __future__ import annotations

import pytest
from hands import cached, driver, hog, prompt, run, serve

from turnout.core import Request
from turnout.plugins.blocks import PagedBlocks
from turnout.testing.block_driver import Driver


def paged(num_blocks: int = 16, block_size: int = 4, **options: object) -> Driver:
    return driver(PagedBlocks, num_blocks, block_size, **options)


@pytest.mark.parametrize("block_size", [2, 8, 16, 32])
def test_a_repeated_prompt_finds_every_full_block_but_the_last_token(block_size: int) -> None:
    for length in (block_size * num + off for num in (1, 2, 3) for off in (-1, 0, 1)):
        drv = paged(block_size=block_size)
        serve(drv, list(range(length)))
        assert cached(drv, list(range(length))) == length // block_size * block_size
        assert drv.manager.cached(Request("b", list(range(length)))) == (length - 1) // block_size * block_size


@pytest.mark.parametrize("num_blocks", [63, 64, 65, 128, 129])
def test_long_prompts_are_found_whole(num_blocks: int) -> None:
    drv = paged(200, block_size=2)
    tokens = [i % 900 for i in range(num_blocks * 2 + 1)]
    serve(drv, tokens)
    assert drv.manager.cached(Request("b", tokens)) == num_blocks * 2
    assert cached(drv, [*tokens[:60], 7, 7, *tokens[62:]]) == 60


def test_requests_that_compute_the_same_at_once_keep_a_copy_each() -> None:
    drv = paged()
    drv.begin()
    twins = [Request(str(i), prompt(1, 2)) for i in range(2)]
    for twin in twins:
        assert drv.take(twin)
    drv.compute()
    assert not set(twins[0].blocks) & set(twins[1].blocks)
    twins[1].tokens += prompt(2)
    drv.begin()
    drv.take(twins[1])
    drv.compute()  # behind the first one's blocks, since those are found
    assert cached(drv, [*prompt(1, 2), *prompt(2)]) == 12


def test_a_tail_whose_middle_gave_way_is_not_found_even_when_that_is_computed_again() -> None:
    drv = paged(4, eviction="fifo")
    tokens = [*prompt(1), *prompt(2), *prompt(3)]
    serve(drv, tokens)
    drv.release(hog(drv, 2))  # the blank block and the oldest, which is the head
    assert cached(drv, tokens) == 0
    serve(drv, prompt(1))
    assert cached(drv, tokens) == 4  # the rest follows a head that is gone


def test_without_a_prefix_cache_nothing_is_found_and_forks_share_all_the_same() -> None:
    drv = paged(prefix_cache=False)
    parent = run(drv, list(range(10)))
    assert cached(drv, list(range(10))) == 0
    drv.begin()
    child = Request("child", [*range(10), 5])
    assert drv.take(child, parent=parent, shared=10)
    drv.compute()
    assert child.blocks[:2] == parent.blocks[:2]
    drv.release(parent)
    assert cached(drv, list(range(10))) == 0 and drv.manager.num_free == 13
