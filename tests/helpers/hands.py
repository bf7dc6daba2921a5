"""Block managers by hand: one request a step, over a cache that says what it holds."""

from __future__ import annotations

from typing import Any

from turnout.core import Request
from turnout.plugins.blocks import PagedBlocks, RadixBlocks
from turnout.testing.block_driver import Driver

MANAGERS = (PagedBlocks, RadixBlocks)


def driver(manager: type, num_blocks: int = 16, block_size: int = 4, **options: Any) -> Driver:
    return Driver(manager(block_size, **options), num_blocks)


def prompt(token: int, num_blocks: int = 1, size: int = 4) -> list[int]:
    return [token] * (size * num_blocks)


def run(drv: Driver, tokens: list[int], rid: str = "a", seconds: float = 1.0, **fields: Any) -> Request:
    """A request whose tokens are all computed, in a step of its own."""
    request = Request(rid, list(tokens), **fields)
    drv.begin(seconds)
    assert drv.take(request)
    drv.compute()
    return request


def serve(drv: Driver, tokens: list[int], rid: str = "a", seconds: float = 1.0, **fields: Any) -> None:
    """The same, and it has ended."""
    drv.release(run(drv, tokens, rid, seconds, **fields))


def cached(drv: Driver, tokens: list[int], **fields: Any) -> int:
    """How many of the tokens a longer request would find."""
    return drv.manager.cached(Request("who asks", [*tokens, 999], **fields))


def found(drv: Driver, tokens: range) -> list[int]:
    """Of which of these the block `prompt` makes is cached."""
    return [token for token in tokens if cached(drv, prompt(token))]


def hog(drv: Driver, num_blocks: int, rid: str = "hog") -> Request:
    """A request that takes so many blocks and publishes none."""
    request = Request(rid, [500] * (num_blocks * drv.size))
    drv.begin(0.0)
    assert drv.take(request)
    drv.taken.clear()
    drv.compute()
    return request
