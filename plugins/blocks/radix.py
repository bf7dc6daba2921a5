"""A block manager that keeps cached prefixes in a tree. It knows ids and tokens, no tensors.

An edge holds one or more whole blocks and is compared at once; it is split where two prompts part.

    salt None ─▶ [ b3 b1 b7 ]─┬─▶ [ b2 ]            b3 b1 b7 are one system prompt, b2 and b5 b9 two conversations
                              └─▶ [ b5 b9 ]

Whoever holds a block holds all before it: a request that comes to publish what is in the tree already takes the tree's
blocks and gives its own back. So nothing is cached behind something that is not, and what gives way is always the end
of a branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import pack

from turnout.core import Request
from turnout.plugins.blocks.finding import Found
from turnout.plugins.blocks.shared import SharedBlocks
from turnout.plugins.blocks.tier import Key
from turnout.plugins.blocks.tree import Tree

PIECE = 64  # blocks whose tokens are turned into bytes at first: most lookups end early


@dataclass
class RadixBlocks(SharedBlocks):
    """Cached prefixes as a tree (RadixAttention of SGLang, NeurIPS 2024) whose nodes hold whole blocks.

    Unlike `paged`: a long hit is found at once; equal prompts computed at the same time are merged; and a prefix is
    matched by the token: where only the first tokens of a block fit, it is copied.
    """

    min_copied: int = 4  # tokens of a block that must fit for it to be copied; 0: only whole blocks are shared

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_copied < 0:
            raise ValueError(f"blocks.min_copied must not be negative, got {self.min_copied}")

    def start(self, num_blocks: int) -> None:
        super().start(num_blocks)
        self._tree = Tree(num_blocks, self._width, self.min_copied * 4)

    def publish(self, request: Request) -> None:
        size, chain = self.block_size, self._chains.get(request.id)
        full = request.num_computed // size
        if (len(chain) if chain else 0) >= full or not self.prefix_cache:
            return
        if chain is None:
            chain = self._chains[request.id] = []
        tree, blocks = self._tree, request.blocks
        place = tree.place(blocks[len(chain) - 1]) if chain else tree.root(request.salt)
        for i in range(len(chain), full):
            tokens = pack(f"{size}i", *request.tokens[i * size : (i + 1) * size])
            there = tree.step(place, tokens)
            if there is None:
                if self._refs[blocks[i]] > 1:  # forked before it was published: others may hold other blocks before it
                    return
                self._numbers[blocks[i]] = self._number((chain[-1] if chain else request.salt, tokens))
                place = tree.append(place, tokens, blocks[i])
            else:
                place = there
                twin = place.node.blocks[place.at - 1]
                if twin != blocks[i]:  # computed twice: one is enough
                    blocks[i] = self._exchange(blocks[i], twin)
            chain.append(self._numbers[blocks[i]])

    def _exchange(self, block: int, twin: int) -> int:
        if not self._refs[twin]:
            self._idle.take(twin)
        self._refs[twin] += 1
        self._refs[block] -= 1
        if not self._refs[block]:
            self._free((block,))
        return twin

    def _find(self, tokens: list[int], end: int, salt: str | None) -> Found:
        tree, width, piece = self._tree, self._width, PIECE * self.block_size
        if not len(tree) and self._tier is None:
            return Found([])
        data = pack(f"{min(end, piece)}i", *tokens[: min(end, piece)])
        found, place = tree.walk(salt, data)
        if len(found) >= PIECE and end > piece:
            data = pack(f"{end}i", *tokens[:end])
            found, place = tree.walk(salt, data)
        if self._tier is not None and self._find_on_host(tokens, end, salt, found):
            return Found(found)
        if place is None or not self.min_copied:
            return Found(found)
        block, same = tree.like(place, data[len(found) * width :])
        return Found(found, block, same // 4) if same // 4 >= self.min_copied else Found(found)

    def _find_on_host(self, tokens: list[int], end: int, salt: str | None, found: list[int]) -> bool:
        """Go on where the tree ends. Whether anything was there."""
        assert self._tier is not None
        size, first = self.block_size, len(found)
        before = self._numbers[found[-1]] if found else salt
        for start in range(first * size, end - size + 1, size):
            entry = self._tier.find((before, pack(f"{size}i", *tokens[start : start + size])))
            if entry is None:
                break
            found.append(~entry.slot)
            before = entry.number
        return len(found) > first

    def _insert(self, block: int, key: Key, before: int | None, salt: str | None) -> None:
        tree = self._tree
        tree.append(tree.root(salt) if before is None else tree.place(before), key[1], block)

    def _drop(self, block: int) -> Key:
        before, salt = self._tree.before(block)
        return salt if before is None else self._numbers[before], self._tree.drop(block)

    def _behind(self, block: int) -> list[int]:
        return self._tree.behind(block)

    def _victim(self) -> int:
        return self._tree.tail(self._idle.next())  # for `fifo`, whose first is the beginning of a branch
