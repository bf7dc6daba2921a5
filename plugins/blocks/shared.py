"""What the block managers have in common: counting who holds a block, forks, copies, eviction. It knows no tensors.

    blank    nobody holds it, nothing in it is worth finding
    held     by one request, or by several that begin alike
    idle     nobody holds it, and its contents may be found: they stay until it is handed out again

Contents that may be found have a number, given out once, for "these tokens after those". How they are found is a
manager's own matter: it fills in the methods at the end of this class.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Request
from turnout.core.optional import BlockMoves, BlockStats
from turnout.plugins.blocks.eviction import new_idle
from turnout.plugins.blocks.finding import Finder, Found
from turnout.plugins.blocks.moves import Moves
from turnout.plugins.blocks.options import Options, pin_seconds
from turnout.plugins.blocks.tier import HostTier, Key


@dataclass
class SharedBlocks(Options, Finder):
    """All that a block manager does but find."""

    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.stats = BlockStats()
        self._width = self.block_size * 4  # bytes of a block's tokens
        self._refs = [0] * num_blocks
        self._numbers = [0] * num_blocks  # of the contents; 0: they can't be found
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: warm memory is reused first
        self._idle = new_idle(self.eviction, int(self.max_pinned * num_blocks), self._numbers)
        self._chains: dict[str, list[int]] = {}  # request id -> numbers of its full, published blocks
        self._forked: set[str] = set()  # ids of requests that may stand in a block that others hold or find
        self._moves = Moves()
        self._tier = HostTier(self.host_blocks, self.ttl) if self.host_blocks else None
        self._next_number = itertools.count(1)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def num_host_blocks(self) -> int:
        return self.host_blocks

    def cached(self, request: Request) -> int:
        found = self._look(request)
        return len(found.blocks) * self.block_size + found.num_part

    def attach(self, request: Request) -> None:
        blocks, part, num_part = self._look(request)
        refs, idle = self._refs, self._idle
        for block in blocks if part < 0 else (*blocks, part):
            if block >= 0:
                if not refs[block]:
                    idle.take(block)
                refs[block] += 1
        if self._tier is not None:
            self._fetch(blocks, request.salt)
        request.blocks.extend(blocks)
        request.num_computed = len(blocks) * self.block_size + num_part
        self._chains[request.id] = [self._numbers[block] for block in blocks]
        if num_part:
            request.blocks.append(part)
            self._forked.add(request.id)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        full, rest = divmod(num_tokens, self.block_size)
        blocks = parent.blocks[: full + (rest > 0)]
        for block in blocks:
            self._refs[block] += 1
        child.blocks.extend(blocks)
        child.num_computed = num_tokens
        self._chains[child.id] = self._chains.get(parent.id, [])[:full]
        if rest:
            self._forked.update((parent.id, child.id))

    def grow(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.block_size) - len(request.blocks)
        if self._forked and request.id in self._forked:
            return self._part(request, max(missing, 0))
        if missing <= 0:
            return True
        if missing > len(self._blank) and missing > self.num_free:
            return False
        self._extend(request.blocks, missing)
        return True

    def release(self, request: Request) -> None:
        blocks, refs = request.blocks, self._refs
        if "pin" in request.labels:
            self._pin(request)
        if self._idle.ranked and request.peak_computed >= request.num_computed:  # else it never ran: it gets them again
            self._idle.used([block for block in blocks if self._numbers[block]], request.priority)
        left: list[int] = []
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                left.append(block)
        self._free(left)
        del blocks[:]
        request.num_computed = 0
        self._chains.pop(request.id, None)
        self._forked.discard(request.id)

    def begin(self, now: float) -> None:
        self._idle.now = now
        self._idle.end_pins()
        if self.ttl is not None:
            for block in self._idle.older_than(self.ttl):
                if self._numbers[block]:
                    for one in self._behind(block):
                        self._count(one)
                        self.stats.expired += 1
                    self._forget(block)
        if self._tier is not None:
            self._tier.begin(now)

    def moves(self) -> BlockMoves:
        return self._moves.take()

    def settle(self, happened: bool) -> None:
        out, copies, back = self._moves.settle()
        if happened:
            self.stats.copied += len(copies)
            self.stats.tier_out += len(out)
            self.stats.tier_in += len(back)
        else:
            for block in back:
                if self._numbers[block]:
                    self._forget(block)
        if self._tier is not None:
            self._tier.settle(() if happened else out)

    def _look(self, request: Request) -> Found:
        """The cached blocks of the longest prefix that leaves a token to compute, if those in host memory have room."""
        found = self._find(request.tokens, len(request.tokens) - 1, request.salt)
        if self._tier is None:
            return found
        room = self.num_free
        for i, block in enumerate(found.blocks):
            room -= block < 0 or not self._refs[block]
            if room < 0:
                return Found(found.blocks[:i])
        if found.num_part and not self._refs[found.part] and not room:
            return Found(found.blocks)
        return found

    def _fetch(self, blocks: list[int], salt: str | None) -> None:
        """Give every block found in host memory one of the cache, where its contents arrive before the step computes."""
        assert self._tier is not None
        wanted = [(i, ~block, *self._tier.fetch(~block)) for i, block in enumerate(blocks) if block < 0]
        for i, slot, key, number in wanted:
            block = blocks[i] = self._hand_out()
            self._refs[block], self._numbers[block] = 1, number
            self._moves.fetch(slot, block)
            self._insert(block, key, blocks[i - 1] if i else None, salt)

    def _part(self, request: Request, missing: int) -> bool:
        """Grow a request that may stand in a block that others hold or find: it gets a copy of its own."""
        blocks, index = request.blocks, request.num_computed // self.block_size
        block = blocks[index] if index < len(blocks) else -1
        held = block >= 0 and self._refs[block] > 1
        copied = held or (block >= 0 and self._numbers[block] > 0)
        if missing + copied > self.num_free:
            if held or missing > self.num_free:
                return False
            self._forget(block)  # no room for a copy, but nobody else holds it: it is written where it is
            copied = False
        if copied:
            blocks[index] = copy = self._hand_out()
            self._refs[copy] = 1
            self._moves.copy(block, copy)
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free((block,))
        self._extend(blocks, missing)
        self._forked.discard(request.id)
        return True

    def _extend(self, blocks: array[int], count: int) -> None:
        for _ in range(count):
            block = self._hand_out()
            self._refs[block] = 1
            blocks.append(block)

    def _hand_out(self) -> int:
        if self._blank:
            return self._blank.pop()
        block = self._victim()
        number, since = self._numbers[block], self._count(block)
        key = self._drop(block)
        self._numbers[block] = 0
        slot = None if self._tier is None else self._tier.keep(key, number, since)
        if slot is not None:
            self._moves.evict(block, slot)
        return block

    def _count(self, block: int) -> float:
        """An idle block gives way. When it became idle."""
        since = self._idle.forget(block)
        assert since is not None
        self.stats.evicted += 1
        self.stats.evicted_age += self._idle.now - since
        return since

    def _free(self, blocks: Sequence[int]) -> None:
        """Nobody holds them any more."""
        numbers, idle = self._numbers, []
        for block in blocks:
            if self._moves.pending and self._moves.cancel(block) and numbers[block]:
                self._forget(block)  # what was to come stays in host memory
            elif numbers[block]:
                idle.append(block)
            else:
                self._blank.append(block)
        if idle:
            self._idle.add(idle)

    def _forget(self, block: int) -> None:
        """Its contents can't be found any more, nor what is found only behind it."""
        for one in self._behind(block):
            self._drop(one)
            self._numbers[one] = 0
            self._idle.forget(one)
            if not self._refs[one]:
                self._blank.append(one)

    def _pin(self, request: Request) -> None:
        """Pin, or unpin, the full blocks of its prompt."""
        seconds = pin_seconds(request.labels["pin"])
        found = self._find(request.tokens, request.num_prompt, request.salt).blocks
        for block in reversed(found):
            if block >= 0 and seconds:
                self._idle.pin(block, seconds)
            elif block >= 0 and seconds is not None:
                self._idle.unpin(block)

    def _number(self, key: Key) -> int:
        """For contents that can be found from now on: that under which their copy in host memory is known, or a new one."""
        entry = None if self._tier is None else self._tier.find(key)
        return next(self._next_number) if entry is None else entry.number
