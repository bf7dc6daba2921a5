"""Which cached block gives way next. It knows block numbers, times and pins; what a block holds is its owner's matter.

A block is idle when nobody holds it and its contents may be asked for again. Idle blocks give way in the order of a
policy, pinned ones after all others, oldest first: a pin is a wish, not a lock, so the pool can always serve.

    lru       least recently released; of one request the tail before the head, so that prefixes live longest
    fifo      first computed
    lfu       fewest requests that computed on it, then lru (Aho, Denning and Ullman, 1971, compare the three)
    priority  least urgent: the most urgent request that ever held it decides, then lru
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

POLICIES = ("lru", "lfu", "fifo", "priority")


class Idle:
    """The idle blocks in the order of lru."""

    ranked = False  # whether `used` must be told

    def __init__(self, max_pinned: int) -> None:
        self.now = 0.0  # seconds on the engine's clock
        self._since: OrderedDict[int, float] = OrderedDict()  # idle, not pinned; oldest first
        self._since_pinned: OrderedDict[int, float] = OrderedDict()  # idle and pinned
        self._pins: OrderedDict[int, float] = OrderedDict()  # block, idle or not -> seconds from last use
        self._max_pinned = max_pinned
        self._first_end = math.inf  # no pin of an idle block is over before

    def __len__(self) -> int:
        return len(self._since) + len(self._since_pinned)

    def add(self, blocks: Iterable[int]) -> None:
        """Nobody holds them any more."""
        now, since, pins = self.now, self._since, self._pins
        for block in blocks:
            if pins and block in pins:
                self._since_pinned[block] = now
                pins.move_to_end(block)
                self._first_end = min(self._first_end, now + pins[block])
            else:
                since[block] = now

    def take(self, block: int) -> None:
        """An idle block is held again."""
        if self._since.pop(block, None) is None:
            del self._since_pinned[block]

    def next(self) -> int:
        """The block to give way. There is one."""
        return next(iter(self._since or self._since_pinned))

    def forget(self, block: int) -> float | None:
        """Its contents are gone, and its pin. When it became idle; None: it was not."""
        if self._pins:
            self._pins.pop(block, None)
            since = self._since_pinned.pop(block, None)
            if since is not None:
                return since
        return self._since.pop(block, None)

    def used(self, blocks: Sequence[int], priority: int) -> None:
        """A request of this priority computed on them."""

    def pin(self, block: int, seconds: float) -> None:
        """Keep it from giving way until nobody used it for so long. Beyond the most there may be, the pin least
        recently used is over."""
        self._pins[block] = max(seconds, self._pins.pop(block, 0.0))
        if block in self._since:
            self._since_pinned[block] = self._since.pop(block)
            self._first_end = min(self._first_end, self._since_pinned[block] + seconds)
        while len(self._pins) > self._max_pinned:
            self.unpin(next(iter(self._pins)))

    def unpin(self, block: int) -> None:
        """From now on it counts as just released."""
        if self._pins.pop(block, None) is not None and self._since_pinned.pop(block, None) is not None:
            self.add((block,))

    def end_pins(self) -> None:
        """End the pins whose time is over."""
        if self.now < self._first_end:
            return
        ends = [(block, since + self._pins[block]) for block, since in self._since_pinned.items()]
        self._first_end = min((end for _, end in ends if end > self.now), default=math.inf)
        for block, end in ends:
            if end <= self.now:
                self.unpin(block)

    def older_than(self, seconds: float) -> list[int]:
        """Idle blocks, not pinned, that nobody used for so long; oldest first."""
        found = []
        for block, since in self._since.items():
            if since + seconds > self.now:
                break
            found.append(block)
        return found


class Ranked(Idle):
    """The idle blocks in the order of another policy."""

    ranked = True

    def __init__(self, max_pinned: int, policy: str, numbers: Sequence[int]) -> None:
        super().__init__(max_pinned)
        first = 0.0 if policy == "lfu" else math.inf
        self._marks = [first] * len(numbers)  # uses, or the most urgent priority
        self._first, self._count = first, policy == "lfu"
        marks = self._marks
        ranks: dict[str, Callable[[int], float]] = {
            "fifo": lambda block: numbers[block],  # given out in the order of computing
            "lfu": lambda block: marks[block],
            "priority": lambda block: -marks[block],
        }
        self._rank = ranks[policy]
        self._stays: dict[int, int] = {}  # block -> its present stay among the idle
        self._num_stays = 0
        self._heap: list[tuple[float, int, int]] = []  # (rank, stay, block); entries of former stays are skipped

    def add(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().add(blocks)
        for block in blocks:
            if block in self._since:
                self._num_stays += 1
                self._stays[block] = self._num_stays
                heapq.heappush(self._heap, (self._rank(block), self._num_stays, block))
        if len(self._heap) > 2 * len(self._stays) + 64:
            self._heap = [entry for entry in self._heap if self._stays.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def take(self, block: int) -> None:
        super().take(block)
        self._stays.pop(block, None)

    def next(self) -> int:
        while self._heap:
            _, stay, block = self._heap[0]
            if self._stays.get(block) == stay:
                return block
            heapq.heappop(self._heap)
        return super().next()

    def forget(self, block: int) -> float | None:
        self._stays.pop(block, None)
        self._marks[block] = self._first
        return super().forget(block)

    def pin(self, block: int, seconds: float) -> None:
        self._stays.pop(block, None)
        super().pin(block, seconds)

    def used(self, blocks: Sequence[int], priority: int) -> None:
        marks = self._marks
        for block in blocks:
            marks[block] = marks[block] + 1 if self._count else min(marks[block], priority)


def new_idle(policy: str, max_pinned: int, numbers: Sequence[int]) -> Idle:
    """`numbers`: of each block's contents, as the manager keeps them."""
    return Idle(max_pinned) if policy == "lru" else Ranked(max_pinned, policy, numbers)
