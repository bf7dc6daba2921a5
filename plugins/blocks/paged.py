"""The default block manager: a prefix cache of single blocks, each found by a key looked up exactly.

A block's key is (number of the block before it, salt in the first block, its tokens as bytes): no hash stands for the
tokens, so two prompts can never collide. A number is given out once, so a block whose forerunner is gone can't be
found by mistake; it leaves when its turn comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct, pack

from turnout.core import Request
from turnout.plugins.blocks.finding import Found
from turnout.plugins.blocks.shared import SharedBlocks
from turnout.plugins.blocks.tier import Key

PIECE = 64  # blocks whose tokens are turned into bytes at once: most lookups end early


@dataclass
class PagedBlocks(SharedBlocks):
    """Fixed-size blocks handed out on demand; full ones are shared between requests with the same prefix and salt.

    The blocks of PagedAttention (vLLM, SOSP 2023). Two requests that compute the same prefix at the same time keep a
    copy each; later ones find the first.
    """

    def start(self, num_blocks: int) -> None:
        super().start(num_blocks)
        self._keys: list[Key | None] = [None] * num_blocks
        self._by_key: dict[Key, int] = {}
        self._cut = Struct(f"{self._width}s").iter_unpack  # bytes -> one by one those of each block

    def publish(self, request: Request) -> None:
        size, chain = self.block_size, self._chains.get(request.id)
        full = request.num_computed // size
        if (len(chain) if chain else 0) >= full or not self.prefix_cache:
            return
        if chain is None:
            chain = self._chains[request.id] = []
        for i in range(len(chain), full):
            tokens = pack(f"{size}i", *request.tokens[i * size : (i + 1) * size])
            key = (chain[-1] if chain else request.salt, tokens)
            block = self._by_key.get(key)
            if block is None:  # else a twin was published first: this copy stays private
                block = request.blocks[i]
                if not self._numbers[block]:  # else whoever shares it published it behind a forerunner since evicted
                    self._numbers[block] = self._number(key)
                    self._by_key[key], self._keys[block] = block, key
            chain.append(self._numbers[block])

    def _find(self, tokens: list[int], end: int, salt: str | None) -> Found:
        found: list[int] = []
        if not self._by_key and self._tier is None:
            return Found(found)
        get, numbers, tier = self._by_key.get, self._numbers, self._tier
        before: int | str | None = salt
        piece = PIECE * self.block_size
        for start in range(0, end - end % self.block_size, piece):
            part = tokens[start : min(start + piece, end - end % self.block_size)]
            for (data,) in self._cut(pack(f"{len(part)}i", *part)):
                block = get((before, data))
                if block is not None:
                    found.append(block)
                    before = numbers[block]
                    continue
                entry = None if tier is None else tier.find((before, data))
                if entry is None:
                    return Found(found)
                found.append(~entry.slot)
                before = entry.number
        return Found(found)

    def _insert(self, block: int, key: Key, before: int | None, salt: str | None) -> None:
        self._by_key[key], self._keys[block] = block, key

    def _drop(self, block: int) -> Key:
        key, self._keys[block] = self._keys[block], None
        assert key is not None
        del self._by_key[key]
        return key

    def _behind(self, block: int) -> list[int]:
        return [block]  # the others can't be found without it, and leave when their turn comes

    def _victim(self) -> int:
        return self._idle.next()
