"""Drives a block manager as the engine does, over a cache whose cells say which tokens they stand for.

A cell holds a checksum of the salt and all tokens up to its own: keys and values depend on no less. So a block that was
shared too early, written while others held it, copied too late or found under another salt shows as a wrong cell.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from turnout.core.interfaces import BlockManager
from turnout.core.optional import SharingBlocks
from turnout.core.types import BlockMoves, Move, Request

POISON = -1
Cells = list[int]


class Driver:
    """Steps by hand: `begin`, some `take` and `preempt`, then `compute`, `fail` or `undo`.

    Every call checks what must hold whatever the manager does; AssertionError says what does not.
    """

    def __init__(self, manager: BlockManager, num_blocks: int) -> None:
        manager.start(num_blocks)
        self.manager, self.size, self.num_blocks = manager, manager.block_size, num_blocks
        self.sharing = manager if isinstance(manager, SharingBlocks) else None
        self.cache: list[Cells] = [[POISON] * self.size for _ in range(num_blocks)]
        self.host: list[Cells] = [
            [POISON] * self.size for _ in range(self.sharing.num_host_blocks if self.sharing else 0)
        ]
        self.holders: dict[str, Request] = {}  # running, or finished and kept
        self.taken: dict[str, tuple[Request, int]] = {}
        self.admitted: set[str] = set()  # by this step
        self.swapped: dict[str, tuple[list[Cells], int]] = {}  # id -> contents, tokens computed
        self._cells: dict[str, tuple[Request, Cells]] = {}  # by id; a mark of the salt, then what the cells should hold
        self._leaving: list[tuple[Request, list[int], list[Cells]]] = []  # swapped out by this step
        self._coming: list[tuple[list[Cells], list[int]]] = []  # and back in
        self.now = 0.0

    def begin(self, seconds: float = 1.0) -> None:
        self.now += seconds
        if self.sharing is not None:
            self.sharing.begin(self.now)

    def take(self, request: Request, count: int | None = None, parent: Request | None = None, shared: int = 0) -> bool:
        """Put up to `count` pending tokens into the step, admitting the request if need be: as a fork of `parent` with
        its first `shared` tokens, or with its cached prefix. False: no room."""
        manager, rid = self.manager, request.id
        waiting = rid not in self.holders
        if waiting and rid not in self.swapped:
            self._admit(request, parent, shared)
        start = request.num_computed
        count = min(count or request.num_pending, request.num_pending)
        blocks, free = list(request.blocks), manager.num_free
        if not manager.grow(request, start + count):
            assert list(request.blocks) == blocks and manager.num_free == free, "grow refused, and yet took something"
            if waiting:
                manager.release(request)
                request.num_computed = start if rid in self.swapped else 0
            return False
        assert len(request.blocks) == -(-(start + count) // self.size), "grow gave another number of blocks than asked"
        if rid in self.swapped:
            self._coming.append((self.swapped[rid][0], list(request.blocks)))
        if waiting:
            self.holders[rid] = request
            self.admitted.add(rid)
        self._check_own(request, start // self.size)
        self.taken[rid] = request, count
        self.check_balance()
        return True

    def preempt(self, request: Request, swap: bool = False) -> None:
        computed = request.num_computed
        if swap:
            contents: list[Cells] = []
            self._leaving.append((request, list(request.blocks), contents))
            self.swapped[request.id] = contents, computed
        self.release(request)
        request.num_computed = computed if swap else 0

    def release(self, request: Request) -> None:
        """It ends, or gives its blocks back."""
        self.manager.release(request)
        assert not request.blocks and request.num_computed == 0, "release left blocks or progress"
        self.holders.pop(request.id, None)
        self.check_balance()

    def compute(self) -> list[Request]:
        """The step runs. Returns the requests that were in it."""
        self._move(self._moves())
        for request, count in self.taken.values():
            cells, start = self.expected(request, request.num_computed + count), request.num_computed
            for position in range(start, start + count):
                self.cache[request.blocks[position // self.size]][position % self.size] = cells[position]
        self._settle(True)
        for request, count in self.taken.values():
            self.swapped.pop(request.id, None)
            request.num_computed += count
            request.peak_computed = max(request.peak_computed, request.num_computed)
            if request.num_computed % self.size < count:
                self.manager.publish(request)
        return self._close()

    def fail(self) -> list[Request]:
        """The step breaks off somewhere: what it was to write is lost, and its requests end."""
        moves = self._moves()
        for target in [m.target for m in moves.copies + moves.back] + [b for _, blocks in self._coming for b in blocks]:
            self.cache[target] = [POISON] * self.size
        for move in moves.out:
            self.host[move.target] = [POISON] * self.size
        self._settle(False)
        self._forget_swaps()
        for request, _ in self.taken.values():
            self.swapped.pop(request.id, None)
            self.release(request)
        return self._close()

    def undo(self) -> list[Request]:
        """The step is not made. Those admitted wait as before, the others start over."""
        for request, _ in self.taken.values():
            computed = self.swapped.get(request.id, ([], 0))[1]
            self.release(request)
            request.num_computed = computed
        self._moves()
        self._settle(False)
        self._forget_swaps()
        return self._close()

    def check(self) -> None:
        """Every holder's cells are right, and all blocks are accounted for."""
        self.check_balance()
        for request in self.holders.values():
            want = self.expected(request, request.num_computed)
            got = [cell for block in request.blocks for cell in self.cache[block]][: request.num_computed]
            assert got == want, f"{request.id} does not hold what it computed, from position {_first(got, want)} on"

    def check_balance(self) -> None:
        held = {block for request in self.holders.values() for block in request.blocks}
        free = self.manager.num_free
        assert len(held) + free == self.num_blocks, f"{len(held)} blocks held + {free} free are not {self.num_blocks}"
        for request in self.holders.values():
            assert len(set(request.blocks)) == len(request.blocks), f"{request.id} holds a block twice"

    def expected(self, request: Request, num_tokens: int) -> Cells:
        """What the cells of its first tokens hold when all is right."""
        known, cells = self._cells.get(request.id, (None, []))
        if known is not request:
            cells = [zlib.crc32(repr(request.salt).encode())]
            self._cells[request.id] = request, cells
        for token in request.tokens[len(cells) - 1 : num_tokens]:
            cells.append(zlib.crc32(token.to_bytes(4, "little"), cells[-1]))
        return cells[1 : num_tokens + 1]

    def _admit(self, request: Request, parent: Request | None, shared: int) -> None:
        if parent is not None and self.sharing is not None:
            self.sharing.fork(parent, request, shared)
            assert request.num_computed == shared, "a fork has another progress than it was given"
            assert list(request.blocks) == list(parent.blocks[: -(-shared // self.size)]), "a fork does not share"
            return
        promised, free = self.manager.cached(request), self.manager.num_free
        assert free == self.manager.num_free and not request.blocks, "cached changed something"
        self.manager.attach(request)
        found = request.num_computed
        assert found == promised, f"cached promised {promised} tokens, attach found {found}"
        assert found < len(request.tokens), "attach left no token to compute"
        assert len(request.blocks) == -(-found // self.size), "attach gave another number of blocks than it found"

    def _check_own(self, request: Request, index: int) -> None:
        written = set(request.blocks[index:])
        for other in self.holders.values():
            assert other is request or written.isdisjoint(other.blocks), (
                f"{request.id} will write what {other.id} holds"
            )

    def _moves(self) -> BlockMoves:
        if self.sharing is None:
            return BlockMoves()
        moves = self.sharing.moves()
        held = {block for request in self.holders.values() for block in request.blocks}
        for targets in (moves.out, moves.copies + moves.back):
            assert len({m.target for m in targets}) == len(targets), f"two moves to one block: {targets}"
        for move in moves.copies + moves.back:
            assert move.target in held, f"{move} fills a block that nobody holds"
        again = self.sharing.moves()
        assert again == BlockMoves(), f"moves handed out twice: {again}"
        return moves

    def _move(self, moves: BlockMoves) -> None:
        for _, blocks, contents in self._leaving:
            contents += [list(self.cache[block]) for block in blocks]
        _copy(self.cache, self.host, moves.out)
        _copy(self.cache, self.cache, moves.copies)
        _copy(self.host, self.cache, moves.back)
        for contents, blocks in self._coming:
            for cells, block in zip(contents, blocks, strict=False):
                self.cache[block] = list(cells)

    def _settle(self, happened: bool) -> None:
        if self.sharing is not None:
            self.sharing.settle(happened)

    def _forget_swaps(self) -> None:
        """What this step was to swap out is lost."""
        for request, _, _ in self._leaving:
            del self.swapped[request.id]
            request.num_computed = 0

    def _close(self) -> list[Request]:
        done = [request for request, _ in self.taken.values()]
        self.taken, self.admitted, self._leaving, self._coming = {}, set(), [], []
        self.check()
        return done


def _copy(sources: Sequence[Cells], targets: list[Cells], moves: Iterable[Move]) -> None:
    read = [(move.target, list(sources[move.source])) for move in moves]
    for target, cells in read:
        targets[target] = cells


def _first(got: Sequence[int], want: Sequence[int]) -> int:
    return next((i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), len(got))
