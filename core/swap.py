"""Host memory for preempted requests: who lies where. It moves no bytes itself; the runner does, as the step says.

    cache   | 7 | 2 | 9 |        preempt(r)   step.swap_out = 7->0, 2->1, 9->2;  blocks 7, 2, 9 are free at once
    host    | 0 | 1 | 2 |        take(r)      step.swap_in  = 0->4, 1->7, 2->5;  host 0, 1, 2 are free after the step

A step does all of swap_out before all of swap_in, so a block may be emptied and filled in the same step; a host block
may not, which is why those of `swap_in` are freed only when the step is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnout.core.interfaces import BlockManager, Preemption
from turnout.core.types import Move, PreemptMode, Request, Stats

if TYPE_CHECKING:
    from turnout.core.draft import Draft


class Swapper:
    """Carries out what the preemption policy decides."""

    def __init__(self, blocks: BlockManager, preemption: Preemption, stats: Stats) -> None:
        self._blocks, self._stats = blocks, stats
        self.policy, self.num_blocks = preemption, preemption.num_host_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._out: list[tuple[Request, Move]] = []
        self._in: list[Move] = []
        self._back: list[Request] = []  # brought back in the step being written
        stats.host_blocks = stats.host_blocks_free = len(self._free)

    @property
    def num_free(self) -> int:
        """Host blocks."""
        return len(self._free)

    @property
    def num_moves(self) -> int:
        """Of the step being written."""
        return len(self._out) + len(self._in)

    def preempt(self, request: Request, mode: PreemptMode | None, draft: Draft) -> None:
        """Free the victim's blocks, keeping their contents in host memory if the mode says so and they fit there."""
        stats = self._stats
        wanted = mode or self.policy.mode(request.view, draft)
        request.num_preemptions += 1
        request.num_slots = 0
        if wanted is PreemptMode.SWAP and len(self._free) < len(request.blocks):
            stats.swap_fallbacks += 1
            wanted = PreemptMode.RECOMPUTE
        if wanted is PreemptMode.RECOMPUTE:
            stats.preemptions_recompute += 1
            self._blocks.release(request)
            return
        stats.preemptions_swap += 1
        stats.swapped_blocks_out += len(request.blocks)
        computed = request.num_computed
        request.host_blocks = [self._free.pop() for _ in request.blocks]
        self._out += [(request, Move(*pair)) for pair in zip(request.blocks, request.host_blocks, strict=True)]
        self._blocks.release(request)
        request.num_computed = computed

    def bring_back(self, request: Request) -> None:
        """Fill the blocks just given to a swapped request from its host blocks. Nothing to do for others."""
        if request.host_blocks:
            self._in += [Move(*pair) for pair in zip(request.host_blocks, request.blocks, strict=False)]
            self._back.append(request)

    def moves(self) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
        """The step's swap_out and swap_in."""
        return tuple(move for _, move in self._out), tuple(self._in)

    def done(self) -> None:
        """The step's moves have happened."""
        if not self._out and not self._in:
            return
        self._stats.swapped_blocks_in += len(self._in)
        for request in self._back:
            self.drop(request)
        self._clear()

    def undo(self) -> None:
        """The step will not run: what was to be swapped out is lost and must be computed again."""
        for request in {id(request): request for request, _ in self._out}.values():
            self.drop(request)
            request.num_computed = 0
        self._clear()

    def drop(self, request: Request) -> None:
        """Free the request's host blocks."""
        self._free += request.host_blocks
        request.host_blocks = []
        self._stats.host_blocks_free = len(self._free)

    def _clear(self) -> None:
        self._out, self._in, self._back = [], [], []
        self._stats.host_blocks_free = len(self._free)
