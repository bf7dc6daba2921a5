"""Every manager, with every kind of option, keeps the contract; the suite finds managers that do not."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import SkipTest

import pytest

from turnout.core import Request
from turnout.plugins.blocks import PagedBlocks, RadixBlocks
from turnout.testing import BlockManagerContract, check_component
from turnout.testing.blocks import block_rules


class TestPaged(BlockManagerContract):
    make = PagedBlocks


class TestPagedByUseWithTimesToLive(BlockManagerContract):
    make = staticmethod(lambda **options: PagedBlocks(eviction="lfu", ttl=4.0, host_blocks=9, **options))


class TestPagedWithoutAPrefixCache(BlockManagerContract):
    make = staticmethod(lambda **options: PagedBlocks(prefix_cache=False, **options))


class TestRadix(BlockManagerContract):
    make = RadixBlocks


class TestRadixFirstInFirstOutWithAHostTier(BlockManagerContract):
    make = staticmethod(lambda **options: RadixBlocks(eviction="fifo", host_blocks=2, max_pinned=1.0, **options))


@dataclass
class Plain:
    """Only what the contract asks for, by hand: no forks, no prefixes."""

    block_size: int = 16
    num_blocks: int | None = None

    def start(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self.free)

    def cached(self, request: Request) -> int:
        return 0

    def attach(self, request: Request) -> None:
        request.num_computed = 0

    def grow(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.block_size) - len(request.blocks)
        if missing > len(self.free):
            return False
        request.blocks.extend(self.free.pop() for _ in range(missing))
        return True

    def publish(self, request: Request) -> None: ...

    def release(self, request: Request) -> None:
        self.free += request.blocks
        del request.blocks[:]
        request.num_computed = 0


class TestAManagerWithoutForksAndPrefixes(BlockManagerContract):
    make = Plain


def first_broken_rule(make: type) -> str | None:
    for rule, check in block_rules(make):
        try:
            check()
        except (AssertionError, IndexError):
            return rule
    return None


@pytest.mark.parametrize("manager", [PagedBlocks, RadixBlocks, Plain])
def test_the_suite_is_run_by_plugins_check(manager: type) -> None:
    rules = {checked.rule: checked.fault for checked in check_component("blocks", manager)}
    assert set(rules.values()) == {None}
    assert ("a fork shares every block and copies the one it writes" in rules) == (manager is not Plain)
    assert "whatever happens every request keeps its own tokens" in rules


def test_rules_that_do_not_apply_are_skipped() -> None:
    with pytest.raises(SkipTest, match="does not share"):
        TestAManagerWithoutForksAndPrefixes().test_forks_of_forks_keep_their_own_tokens()
    with pytest.raises(SkipTest, match="does not cache"):
        TestPagedWithoutAPrefixCache().test_salts_are_kept_apart()


class FreesTwice(PagedBlocks):
    def release(self, request: Request) -> None:
        again = [block for block in request.blocks if self._refs[block] == 1 and not self._numbers[block]]
        super().release(request)
        self._blank += again


class KeepsTheBlocksOfWhoeverComputedNothing(PagedBlocks):
    def release(self, request: Request) -> None:
        if request.num_computed or not request.blocks:
            super().release(request)
        else:
            del request.blocks[:]


class CountsStaleHits(PagedBlocks):
    def cached(self, request: Request) -> int:
        memo = self.__dict__.setdefault("memo", {})
        return int(memo.setdefault(tuple(request.tokens), super().cached(request)))


class WritesSharedBlocks(PagedBlocks):
    def _part(self, request: Request, missing: int) -> bool:
        return missing <= self.num_free and (self._extend(request.blocks, missing) or True)


class CopiesOnlyWhatOthersHold(PagedBlocks):
    def _part(self, request: Request, missing: int) -> bool:
        block = request.blocks[request.num_computed // self.block_size]
        return (
            WritesSharedBlocks._part(self, request, missing)
            if self._refs[block] == 1
            else super()._part(request, missing)
        )


class IgnoresSalts(PagedBlocks):
    def publish(self, request: Request) -> None:
        salt, request.salt = request.salt, None
        super().publish(request)
        request.salt = salt

    def _find(self, tokens: list[int], end: int, salt: str | None) -> object:
        return super()._find(tokens, end, None)


class ForgetsToCountTheCopy(PagedBlocks):
    def grow(self, request: Request, num_tokens: int) -> bool:
        short = -(-num_tokens // self.block_size) - len(request.blocks)
        return short <= self.num_free and (super().grow(request, num_tokens) or bool(request.blocks))


class PublishesTooEarly(PagedBlocks):
    def grow(self, request: Request, num_tokens: int) -> bool:
        grown = super().grow(request, num_tokens)
        if grown:
            computed, request.num_computed = request.num_computed, num_tokens
            self.publish(request)
            request.num_computed = computed
        return grown


class MovesWhatWasGivenBack(PagedBlocks):
    def start(self, num_blocks: int) -> None:
        super().start(num_blocks)
        self._moves.cancel = lambda block: False  # type: ignore[method-assign]


class TrustsMovesThatFailed(PagedBlocks):
    def __init__(self, **options: object) -> None:
        super().__init__(**{"host_blocks": 6} | options)  # type: ignore[arg-type]

    def settle(self, happened: bool) -> None:
        super().settle(True)


class ReusesHostBlocksInUse(TrustsMovesThatFailed):
    def settle(self, happened: bool) -> None:
        PagedBlocks.settle(self, happened)

    def begin(self, now: float) -> None:
        super().begin(now)
        assert self._tier is not None
        self._tier._locked = type("Never", (set,), {"__contains__": lambda *_: False})()


def test_a_fault_is_named_by_plugins_check() -> None:
    broken = {checked.rule: checked.fault for checked in check_component("blocks", IgnoresSalts) if checked.fault}
    assert "AssertionError: salt '' found another's blocks" in broken["salts are kept apart"]


@pytest.mark.parametrize(
    "faulty",
    [
        FreesTwice,
        KeepsTheBlocksOfWhoeverComputedNothing,
        CountsStaleHits,
        WritesSharedBlocks,
        CopiesOnlyWhatOthersHold,
        IgnoresSalts,
        ForgetsToCountTheCopy,
        PublishesTooEarly,
        MovesWhatWasGivenBack,
        TrustsMovesThatFailed,
        ReusesHostBlocksInUse,
    ],
)
def test_the_suite_finds_a_planted_fault(faulty: type) -> None:
    assert first_broken_rule(faulty)
