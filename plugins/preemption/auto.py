"""Preemption by whichever is cheaper."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.core import Draft, PreemptMode, RequestView
from turnout.plugins.preemption.swap import Swap

REMEASURE = 1000  # steps without a move after which the next victim is swapped to see what a move costs now


@dataclass
class Auto(Swap):
    """Swaps a victim or computes it again, whichever the engine's estimate says is cheaper, and says why.

    Both costs come from finished steps (`draft.cost`): what a prompt's tokens add to a step, and what moving a block
    does. Prompts are always there to learn from; moves are not, so the first victim is swapped, and one every thousand
    steps. A victim that host memory has no room for is computed again.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._moved_at: int | None = None  # steps seen by the estimate when a victim was last swapped

    def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
        blocks, tokens, cost = request.num_blocks, request.num_computed, draft.cost
        if blocks > draft.host_blocks_free:
            why = f"host memory has {draft.host_blocks_free} blocks free, it holds {blocks}"
            draft.explain(request, f"to be computed again: {why}")
            return PreemptMode.RECOMPUTE
        move, compute = cost.swap(blocks), cost.recompute(tokens)
        untried = self._moved_at is None or cost.num_seen - self._moved_at > REMEASURE
        figures = (
            f"moving {blocks} blocks out and back is expected to take {move * 1e3:.3g} ms, "
            f"computing {tokens} tokens again {compute * 1e3:.3g} ms"
        )
        if not untried and compute < move:
            draft.explain(request, f"to be computed again: {figures}")
            return PreemptMode.RECOMPUTE
        self._moved_at = cost.num_seen
        draft.explain(request, f"swapped out{' to measure it' if compute < move else ''}: {figures}")
        return PreemptMode.SWAP
