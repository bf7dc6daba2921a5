"""What the rules of block managers stand on."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest import SkipTest

from turnout.core.interfaces import BlockManager
from turnout.core.optional import SharingBlocks
from turnout.core.types import Request
from turnout.testing.block_driver import Driver


class BlockRules:
    """`make` builds a manager; it gets `block_size`."""

    make: Callable[..., BlockManager]

    def can(self, ability: str) -> bool:
        """Whether the manager is a `SharingBlocks` ("share"), whether it keeps prefixes at all ("cache")."""
        if ability == "share":
            return isinstance(self.make(block_size=4), SharingBlocks)
        driver = self.driver()
        driver.release(self.ran(driver, ask("a", 12)))
        return driver.manager.cached(ask("b", 12)) > 0

    def driver(self, num_blocks: int = 16, block_size: int = 4) -> Driver:
        return Driver(self.make(block_size=block_size), num_blocks)

    def ran(self, driver: Driver, request: Request, **how: Any) -> Request:
        """The request after a step that computed all of its tokens."""
        driver.begin()
        assert driver.take(request, **how), "there was room, and grow refused"
        driver.compute()
        return request


def needs(*abilities: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Skip a rule where the manager is not able to do all of these."""

    def mark(test: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(test)
        def run(self: Any) -> None:
            for ability in abilities:
                if not self.can(ability):
                    raise SkipTest(f"it does not {ability}")
            test(self)

        run.needs = abilities  # type: ignore[attr-defined]
        return run

    return mark


def ask(rid: str, num: int, seed: int = 0, **fields: Any) -> Request:
    """A request of `num` prompt tokens; equal seeds begin alike."""
    dice = random.Random(seed)
    return Request(rid, [dice.randrange(900) for _ in range(num)], **fields)
