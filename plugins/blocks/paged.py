"""The default block manager: reference-counted blocks with a prefix cache. It knows ids and tokens, no tensors.

A block's key is (node of the block before it, salt in the first block, its tokens as bytes), looked up exactly: no
hash stands for the tokens, so two prompts can never collide. A node is a number given out once, so a block whose
forerunner was evicted can't be found by mistake; it leaves when its turn comes.

A block without owners keeps its contents until it is handed out again. Blocks with nothing worth keeping go first,
then the least recently released; of one request the tail goes before the head, so that prefixes live longest.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass

from turnout.core import Request

Key = tuple[int | str | None, bytes]  # a first block's parent is the salt: a str or None, never an int


@dataclass
class PagedBlocks:
    """Fixed-size blocks handed out on demand; full ones are shared between requests with the same prefix and salt."""

    block_size: int = 16  # tokens
    num_blocks: int | None = None  # None: as many as memory allows
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"blocks.block_size must be at least 1, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"blocks.num_blocks must be at least 1, or null to fit memory, got {self.num_blocks}")

    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._nodes = [0] * num_blocks  # meaningful where the key is not None
        self._by_key: dict[Key, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: warm memory is reused first
        self._kept: dict[int, None] = {}  # no owner, contents worth finding; oldest first
        self._chains: dict[str, list[int]] = {}  # request id -> nodes of its full, published blocks
        self._next_node = itertools.count(1)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    def cached(self, request: Request) -> int:
        return len(self._find(request)) * self.block_size

    def attach(self, request: Request) -> None:
        found = self._find(request)
        for block in found:
            if not self._refs[block]:
                del self._kept[block]
            self._refs[block] += 1
        request.blocks.extend(found)
        request.num_computed = len(found) * self.block_size
        self._chains[request.id] = [self._nodes[block] for block in found]

    def grow(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.block_size) - len(request.blocks)
        if missing <= 0:
            return True
        if missing > len(self._blank) + len(self._kept):
            return False
        for _ in range(missing):
            block = self._blank.pop() if self._blank else self._evict()
            self._refs[block] = 1
            request.blocks.append(block)
        return True

    def publish(self, request: Request) -> None:
        size, chain = self.block_size, self._chains.get(request.id)
        full = request.num_computed // size
        if (len(chain) if chain else 0) >= full or not self.prefix_cache:
            return
        if chain is None:
            chain = self._chains[request.id] = []
        for i in range(len(chain), full):
            key = (
                chain[-1] if chain else request.salt,
                array("i", request.tokens[i * size : (i + 1) * size]).tobytes(),
            )
            block = self._by_key.get(key)
            if block is None:  # else a twin was published first: this copy stays private
                block = request.blocks[i]
                self._by_key[key], self._keys[block], self._nodes[block] = block, key, next(self._next_node)
            chain.append(self._nodes[block])

    def release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                if self._keys[block] is None:
                    self._blank.append(block)
                else:
                    self._kept[block] = None
        del request.blocks[:]
        request.num_computed = 0
        self._chains.pop(request.id, None)

    def _find(self, request: Request) -> list[int]:
        """The cached blocks of the longest prefix that leaves a token to compute."""
        found: list[int] = []
        if not self._by_key:
            return found
        width = self.block_size * 4  # bytes
        tokens = memoryview(array("i", request.tokens[:-1]).tobytes())
        parent: int | str | None = request.salt
        for end in range(width, len(tokens) + 1, width):
            block = self._by_key.get((parent, bytes(tokens[end - width : end])))
            if block is None:
                break
            found.append(block)
            parent = self._nodes[block]
        return found

    def _evict(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        key, self._keys[block] = self._keys[block], None
        assert key is not None
        del self._by_key[key]
        return block
