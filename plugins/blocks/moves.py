"""What must be copied before the next step computes. It knows block numbers only, no request and no tokens.

    out     cache -> host     an evicted block goes to the host tier
    copies  cache -> cache    a block that others hold, or may find, is about to be written
    back    host -> cache     a block of the host tier is wanted again

A step does all of `out`, then all of `copies`, each source read before any target is written, then all of `back`. So
contents that arrive in this step can't be copied in it: whoever wants them takes them from where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from turnout.core.model import Move
from turnout.core.optional import BlockMoves

NONE = BlockMoves()


class Batch(NamedTuple):
    """The moves of one step, by target."""

    out: Mapping[int, int]
    copies: Mapping[int, int]
    back: Mapping[int, int]


NOTHING = Batch({}, {}, {})


class Moves:
    """Collects moves, drops those whose target is given back in time, and remembers the ones on their way."""

    def __init__(self) -> None:
        self._out: dict[int, int] = {}  # host block -> cache block
        self._copies: dict[int, int] = {}  # cache block -> cache block
        self._back: dict[int, int] = {}  # cache block -> host block
        self._flying = NOTHING

    @property
    def pending(self) -> bool:
        """Some block waits for its contents."""
        return bool(self._copies or self._back)

    def evict(self, block: int, slot: int) -> None:
        self._out[slot] = block

    def copy(self, source: int, target: int) -> None:
        if source in self._back:
            self._back[target] = self._back[source]
        else:
            self._copies[target] = self._copies.get(source, source)

    def fetch(self, slot: int, target: int) -> None:
        self._back[target] = slot

    def cancel(self, block: int) -> bool:
        """The block is given back: nothing need come. True when its contents were to come from the host."""
        self._copies.pop(block, None)
        return self._back.pop(block, None) is not None

    def take(self) -> BlockMoves:
        """The moves collected. They are on their way until `settle`."""
        if not (self._out or self._copies or self._back):
            return NONE
        self._flying = Batch(self._out, self._copies, self._back)
        moves = BlockMoves(
            tuple(Move(block, slot) for slot, block in self._out.items()),
            tuple(Move(source, target) for target, source in self._copies.items()),
            tuple(Move(slot, target) for target, slot in self._back.items()),
        )
        self._out, self._copies, self._back = {}, {}, {}
        return moves

    def settle(self) -> Batch:
        """The moves that were on their way; they are no longer."""
        batch, self._flying = self._flying, NOTHING
        return batch
