"""Random traffic for a block manager: admissions, decodes, forks, preemptions, failures, ends, in tiny pools."""

from __future__ import annotations

import random

from turnout.core.interfaces import BlockManager
from turnout.core.types import Request
from turnout.testing.block_driver import Driver

STEPS = 80
SALTS = (None, None, None, "", "a")
LABELS: tuple[dict[str, str], ...] = ({}, {}, {}, {"pin": "true"}, {"pin": "3s"}, {"pin": "false"})


class Storm:
    """What the engine and a moody scheduler might do. AssertionError names the request that suffered."""

    def __init__(self, manager: BlockManager, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.num_blocks = dice.choice((3, 6, 12, 30))
        self.driver = Driver(manager, self.num_blocks)
        self.capacity = self.num_blocks * manager.block_size
        self.stems = [[dice.randrange(3) for _ in range(self.capacity)] for _ in range(2)]
        self.waiting: list[Request] = []
        self.kept: list[Request] = []
        self.count = 0

    @property
    def running(self) -> list[Request]:
        return [r for r in self.driver.holders.values() if r not in self.kept]

    def step(self) -> None:
        dice, driver = self.dice, self.driver
        driver.begin(dice.choice((0.1, 1.0, 5.0)))
        if len(self.waiting) < 4:
            self.waiting.append(self.new())
        for request in self.shuffled(self.running):
            mood = dice.random()
            if mood < 0.1 or mood < 0.8 and not driver.take(request, dice.randint(1, 9)):
                self.preempt(request)
        for request in self.shuffled(self.waiting):
            self.admit(request)
        for parent in self.shuffled([*self.running, *self.kept]):
            if dice.random() < 0.3 and parent.num_computed and parent.id not in driver.admitted and driver.sharing:
                self.fork(parent)
        self.close()
        for request in self.shuffled([*self.running, *self.kept]):
            self.end(request)

    def shuffled(self, requests: list[Request]) -> list[Request]:
        return self.dice.sample(requests, len(requests))

    def new(self) -> Request:
        dice = self.dice
        self.count += 1
        stem = dice.choice(self.stems)[: dice.randint(0, self.capacity - 1)]
        tokens = [*stem, *(dice.randrange(3) for _ in range(dice.randint(1, 6)))][: self.capacity]
        return Request(
            f"{self.count}", tokens, salt=dice.choice(SALTS), labels=dice.choice(LABELS), priority=dice.randrange(3)
        )

    def admit(self, request: Request) -> None:
        if self.driver.take(request, self.dice.randint(1, 20)):
            self.waiting.remove(request)

    def preempt(self, request: Request) -> None:
        if request.id not in self.driver.taken:
            self.driver.preempt(request, swap=self.dice.random() < 0.5)
            self.waiting.append(request)

    def fork(self, parent: Request) -> None:
        """A child that begins like its parent: as far as that is computed, or less."""
        dice = self.dice
        length = dice.choice((parent.num_computed, dice.randint(1, parent.num_computed)))
        tokens = [*parent.tokens[:length], *(dice.randrange(3) for _ in range(dice.randint(0, 3)))][: self.capacity]
        shared = min(length, len(tokens) - 1)
        if shared < 1:
            return
        self.count += 1
        child = Request(f"{self.count} of {parent.id}", tokens, salt=parent.salt)
        if not self.driver.take(child, parent=parent, shared=shared) and self.kept:
            self.driver.release(self.kept.pop(0))  # as the engine makes room
            if parent in self.driver.holders.values():
                self.driver.take(child, parent=parent, shared=shared)

    def close(self) -> None:
        """The step runs, mostly; each request that is through says a token."""
        mood, driver = self.dice.random(), self.driver
        if mood < 0.9:
            for request in driver.compute():
                if not request.num_pending and len(request.tokens) < self.capacity:
                    request.tokens.append(self.dice.randrange(3))
        elif mood < 0.95:
            driver.fail()
        else:
            for request in driver.undo():
                if " of " not in request.id:
                    self.waiting.append(request)

    def end(self, request: Request) -> None:
        through = not request.num_pending
        if request in self.kept or through or self.dice.random() < 0.15:
            if through and request not in self.kept and self.dice.random() < 0.5:
                self.kept.append(request)  # with its blocks
            elif self.dice.random() < 0.5:
                self.driver.release(request)
                self.kept = [other for other in self.kept if other is not request]


def storm(manager: BlockManager, seed: int) -> None:
    """Raises AssertionError when a request does not hold what it computed, or blocks are lost."""
    storm = Storm(manager, seed)
    for _ in range(STEPS):
        storm.step()
    driver = storm.driver
    for request in list(driver.holders.values()):
        driver.release(request)
    assert manager.num_free == storm.num_blocks, f"{manager.num_free} of {storm.num_blocks} blocks are free at the end"
    driver.begin()
    largest = Request("largest", [7] * storm.capacity)
    assert driver.take(largest), "a request that fits an empty pool was refused when nobody held a block"
    driver.compute()
