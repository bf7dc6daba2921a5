"""The contract of a block manager as a suite to inherit. It tells nothing of how prefixes are found or what gives way.

    class TestMine(BlockManagerContract):
        make = staticmethod(lambda **options: Mine(**options))

`make` gets `block_size` and builds a manager. What a manager without `SharingBlocks` can't do is skipped.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest import SkipTest

from turnout.core.interfaces import BlockManager, SharingBlocks
from turnout.core.types import Request
from turnout.testing.block_driver import Driver
from turnout.testing.block_storm import storm

SALTS = (None, "", "a", "b", "0", "None")


def sharing(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """A rule of `SharingBlocks`."""

    @wraps(test)
    def run(self: Any) -> None:
        if not isinstance(self.make(block_size=4), SharingBlocks):
            raise SkipTest("not a SharingBlocks")
        test(self)

    return run


def ask(rid: str, num: int, seed: int = 0, **fields: Any) -> Request:
    """A request of `num` prompt tokens; equal seeds begin alike."""
    dice = random.Random(seed)
    return Request(rid, [dice.randrange(900) for _ in range(num)], **fields)


class BlockManagerContract:
    """Subclass it with `make`."""

    make: Callable[..., BlockManager]

    def driver(self, num_blocks: int = 16, block_size: int = 4) -> Driver:
        return Driver(self.make(block_size=block_size), num_blocks)

    def ran(self, driver: Driver, request: Request, **how: Any) -> Request:
        """The request after a step that computed all of its tokens."""
        driver.begin()
        assert driver.take(request, **how), "there was room, and grow refused"
        driver.compute()
        return request

    def test_at_the_start_every_block_is_free(self) -> None:
        driver = self.driver(7)
        assert driver.manager.num_free == 7
        self.ran(driver, ask("a", 28))
        driver.manager.start(5)
        assert driver.manager.num_free == 5 and driver.manager.cached(ask("a", 28)) == 0

    def test_growing_is_all_or_nothing(self) -> None:
        driver = self.driver(3)
        driver.begin()
        request = ask("a", 20)
        assert not driver.take(request, 13) and driver.manager.num_free == 3
        assert driver.take(request, 12) and driver.manager.num_free == 0
        driver.compute()

    def test_every_free_block_can_be_had(self) -> None:
        driver = self.driver(12)
        held = self.ran(driver, ask("held", 9, 1))
        for i in range(5):
            driver.release(self.ran(driver, ask(f"{i}", 18, i)))
        free = driver.manager.num_free
        assert free == 12 - len(held.blocks)
        self.ran(driver, ask("all", free * 4, 9))
        assert driver.manager.num_free == 0

    def test_a_prompt_seen_before_is_found_and_leaves_a_token_to_compute(self) -> None:
        for size in (1, 2, 4, 16):
            for length in [blocks * size + off for blocks in (1, 2, 3) for off in (-1, 0, 1)]:
                driver = self.driver(16, size)
                if length < 1:
                    continue
                driver.release(self.ran(driver, ask("a", length)))
                least = (length - 1) // size * size
                found = driver.manager.cached(ask("b", length))
                assert least <= found < length, f"{found} of {length} tokens found, block size {size}"
                self.ran(driver, ask("b", length))

    def test_a_hit_ends_where_prompts_part(self) -> None:
        driver = self.driver()
        first = self.ran(driver, ask("a", 14))
        for part in range(14):
            other = Request(f"b{part}", [t + (i == part) for i, t in enumerate(first.tokens)])
            assert part // 4 * 4 <= driver.manager.cached(other) <= part
            driver.release(self.ran(driver, other))

    def test_the_middle_of_a_prompt_is_not_found_without_its_beginning(self) -> None:
        driver = self.driver()
        first = self.ran(driver, ask("a", 16))
        assert driver.manager.cached(Request("b", first.tokens[4:])) == 0

    def test_salts_are_kept_apart(self) -> None:
        driver = self.driver(64)
        for i, salt in enumerate(SALTS):
            assert driver.manager.cached(ask("x", 13, salt=salt)) == 0, f"salt {salt!r} found another's blocks"
            self.ran(driver, ask(str(i), 13, salt=salt))
            assert driver.manager.cached(ask("x", 13, salt=salt)) == 12

    def test_only_what_is_computed_and_published_is_found(self) -> None:
        driver = self.driver()
        request = ask("a", 16)
        driver.begin()
        driver.take(request, 6)
        assert driver.manager.cached(ask("b", 16)) == 0
        driver.compute()
        assert 4 <= driver.manager.cached(ask("b", 16)) <= 6

    def test_a_shared_block_is_freed_by_its_last_holder(self) -> None:
        driver = self.driver(8)
        first = self.ran(driver, ask("a", 12))
        second = self.ran(driver, Request("b", [*first.tokens, 1, 2]))
        assert second.blocks[:3] == first.blocks, "two requests that begin alike do not share"
        driver.release(first)
        driver.manager.release(first)  # harmless
        assert driver.manager.num_free == 4
        driver.release(second)
        assert driver.manager.num_free == 8

    def test_a_request_that_computed_nothing_gives_all_back(self) -> None:
        driver = self.driver(8)
        driver.release(self.ran(driver, ask("a", 12)))
        for _ in range(3):
            late = ask("late", 12)
            driver.manager.attach(late)
            assert driver.manager.grow(late, 12)
            driver.manager.release(late)
            assert driver.manager.num_free == 8 and late.num_computed == 0
        assert driver.manager.cached(late) >= 8, "a request that left took the cached prefix with it"

    def test_two_that_compute_the_same_at_once_both_get_it_right(self) -> None:
        driver = self.driver(12)
        driver.begin()
        twins = [ask("a", 10), ask("b", 10)]
        for twin in twins:
            assert driver.take(twin)
        driver.compute()
        for twin in twins:
            twin.tokens += [1, 2, 3]
            self.ran(driver, twin)
            driver.release(twin)
        assert driver.manager.num_free == 12

    def test_a_request_brought_back_from_host_memory_is_published_rightly(self) -> None:
        driver = self.driver(8)
        request = self.ran(driver, ask("a", 10))
        driver.begin()
        driver.preempt(request, swap=True)
        driver.compute()
        self.ran(driver, ask("other", 30, 1))
        driver.release(driver.holders["other"])
        request.tokens += [1, 2, 3]
        self.ran(driver, request)
        driver.release(request)
        self.ran(driver, Request("b", [*request.tokens, 4]))

    def test_whatever_happens_every_request_keeps_its_own_tokens(self) -> None:
        for seed in range(24):
            storm(self.make(block_size=(4, 2, 1)[seed % 3]), seed)
