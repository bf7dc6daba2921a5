"""A tree of token prefixes whose edges hold whole blocks. It knows no requests and counts no holders."""

from __future__ import annotations

from typing import NamedTuple


class Node:
    """An edge and where it leads. The root of a salt has no blocks."""

    __slots__ = ("before", "blocks", "branches", "hints", "salt", "tokens")

    def __init__(self, before: Node | None, salt: str | None = None) -> None:
        self.before, self.salt = before, salt
        self.tokens = bytearray()
        self.blocks: list[int] = []
        self.branches: dict[bytes, Node] = {}  # by the tokens of their first block
        self.hints: dict[bytes, Node] = {}  # by their first few tokens: the latest branch that begins so


class Place(NamedTuple):
    """Behind the first `at` blocks of a node."""

    node: Node
    at: int


class Tree:
    """Prefixes by salt. Tokens are bytes, `width` of them a block."""

    def __init__(self, num_blocks: int, width: int, hint: int) -> None:
        self._width, self._hint = width, hint  # bytes
        self._roots: dict[str | None, Node] = {}
        self._where: list[Node | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._roots)

    def root(self, salt: str | None) -> Place:
        return Place(self._roots.setdefault(salt, Node(None, salt)), 0)

    def place(self, block: int) -> Place:
        """Right behind a block of the tree."""
        node = self._where[block]
        assert node is not None
        return Place(node, len(node.blocks) if node.blocks[-1] == block else node.blocks.index(block) + 1)

    def walk(self, salt: str | None, data: bytes) -> tuple[list[int], Place | None]:
        """The blocks of the longest prefix of `data` that is there, and where it ends; None: there is no such salt."""
        node, start, width = self._roots.get(salt), 0, self._width
        found: list[int] = []
        if node is None:
            return [], None
        while (branch := node.branches.get(data[start : start + width])) is not None:
            node = branch
            if not data.startswith(node.tokens, start):
                same = self._same(node, data, start)
                return found + node.blocks[:same], Place(node, same)
            found += node.blocks
            start += len(node.tokens)
        return found, Place(node, len(node.blocks))

    def step(self, place: Place, tokens: bytes) -> Place | None:
        """One block further, if its tokens are there."""
        node, at = place
        if at < len(node.blocks):
            held = node.tokens[at * self._width : (at + 1) * self._width]
            return Place(node, at + 1) if held == tokens else None
        branch = node.branches.get(tokens)
        return None if branch is None else Place(branch, 1)

    def append(self, place: Place, tokens: bytes, block: int) -> Place:
        """Put a block behind a place where its tokens are not."""
        node, at = place
        if at < len(node.blocks):
            node = self._split(node, at)
        if node.before is None or node.branches:
            node = self._branch(node, Node(node), tokens)
        node.tokens += tokens
        node.blocks.append(block)
        self._where[block] = node
        return Place(node, len(node.blocks))

    def like(self, place: Place, rest: bytes) -> tuple[int, int]:
        """The block behind a place that begins most like `rest`, and how many bytes of it do; as far as hints tell."""
        node, at = place
        if at == len(node.blocks):
            branch = node.hints.get(rest[: self._hint])
            if branch is None:
                return -1, 0
            node, at = branch, 0
        held = node.tokens[at * self._width : (at + 1) * self._width]
        length = min(len(held), len(rest))
        differ = int.from_bytes(held[:length], "little") ^ int.from_bytes(rest[:length], "little")
        return node.blocks[at], ((differ & -differ).bit_length() - 1) // 8 if differ else length

    def before(self, block: int) -> tuple[int | None, str | None]:
        """The block before it; None for a first one, and then its salt."""
        node, at = self.place(block)
        if at > 1:
            return node.blocks[at - 2], None
        assert node.before is not None
        return (node.before.blocks[-1], None) if node.before.blocks else (None, node.before.salt)

    def behind(self, block: int) -> list[int]:
        """It, and all blocks behind it; the furthest first."""
        node, at = self.place(block)
        found, rest = node.blocks[at - 1 :], list(node.branches.values())
        while rest:
            node = rest.pop()
            found += node.blocks
            rest += node.branches.values()
        return found[::-1]

    def tail(self, block: int) -> int:
        """The last block of a branch that goes through it."""
        node = self._where[block]
        assert node is not None
        while node.branches:
            node = next(iter(node.branches.values()))
        return node.blocks[-1]

    def drop(self, block: int) -> bytes:
        """Take away the last block of a branch. Its tokens."""
        node, width = self._where[block], self._width
        assert node is not None and node.before is not None and node.blocks[-1] == block and not node.branches
        self._where[block] = None
        tokens = bytes(node.tokens[-width:])
        del node.blocks[-1], node.tokens[-width:]
        if not node.blocks:
            before = node.before
            del before.branches[tokens]
            if before.hints.get(tokens[: self._hint]) is node:
                del before.hints[tokens[: self._hint]]
            if before.before is None and not before.branches:
                del self._roots[before.salt]
        return tokens

    def _same(self, node: Node, data: bytes, start: int) -> int:
        """How many blocks of the node begin `data` from `start` on; its first one does."""
        width = self._width
        low, high = 1, min(len(node.blocks), (len(data) - start) // width)
        while low < high:
            middle = (low + high + 1) // 2
            if node.tokens[low * width : middle * width] == data[start + low * width : start + middle * width]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, at: int) -> Node:
        """Make a node of its first `at` blocks, with the rest as a branch."""
        assert node.before is not None
        width = self._width
        upper = self._branch(node.before, Node(node.before), bytes(node.tokens[:width]))
        upper.tokens, upper.blocks = node.tokens[: at * width], node.blocks[:at]
        del node.tokens[: at * width], node.blocks[:at]
        node.before = upper
        self._branch(upper, node, bytes(node.tokens[:width]))
        for block in upper.blocks:
            self._where[block] = upper
        return upper

    def _branch(self, node: Node, branch: Node, tokens: bytes) -> Node:
        node.branches[tokens] = branch
        if self._hint:
            node.hints[tokens[: self._hint]] = branch
        return branch
