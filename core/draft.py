"""The step being written. It keeps the rules, so that no policy can break them.

A scheduler meets only this class. The token budget, the seats, the blocks, one chunk per request: all are checked here,
and whatever a faulty scheduler took can be given back whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING

from turnout.core.cost import Load, StepCost
from turnout.core.types import Chunk, ContractError, Move, PreemptMode, Request, Step

if TYPE_CHECKING:
    from turnout.core.interfaces import BlockManager
    from turnout.core.optional import SharingBlocks
    from turnout.core.swap import Swapper


_new = tuple.__new__  # a named tuple in half the time
SCORED_CHUNK = 256  # tokens; scoring a prompt needs logits for each of them, vocab_size floats a token


class Draft:
    """What a scheduler writes into."""

    def __init__(
        self,
        blocks: BlockManager,
        swapper: Swapper,
        waiting: Mapping[str, Request],
        running: Mapping[str, Request],
        kept: dict[str, Request],
        cost: StepCost,
        *,
        max_tokens: int,
        max_seqs: int,
        sharing: SharingBlocks | None = None,
        now: float = 0.0,
    ) -> None:
        self._blocks, self._swapper, self._sharing = blocks, swapper, sharing
        self._waiting, self._running, self._kept = waiting, running, kept
        self._chunks: dict[str, Chunk] = {}
        self._preempted: dict[str, Request] = {}
        self._attached: list[Request] = []  # admitted in this step
        self._open = True
        self._decodes = self._decode_keys = self._prefill_tokens = self._prefill_keys = 0
        self._promised = 0  # tokens that prompts of this step still have before them
        self.cost = cost  # what a step costs, learned from finished ones
        self.reasons: dict[str, str] = {}
        self.now = now  # seconds on the engine's clock: the only time a scheduler may look at
        self.tokens_left = max_tokens
        self.seats_left = max_seqs - len(running)  # a running request has its seat; admitting takes one

    @property
    def full(self) -> bool:
        """No token is left: nothing more can be taken in this step."""
        return self.tokens_left <= 0

    @property
    def blocks_free(self) -> int:
        """Blocks that can still be handed out."""
        return self._blocks.num_free

    @property
    def num_host_free(self) -> int:
        """Host blocks that a victim's blocks can still be swapped to."""
        return self._swapper.num_free

    @property
    def preempted(self) -> bool:
        """Whether this step sends a request back to wait: admitting others now would take the room just made."""
        return bool(self._preempted)

    @property
    def chunks(self) -> Collection[Chunk]:
        """What was taken so far, in order."""
        return self._chunks.values()

    @property
    def load(self) -> Load:
        """What that amounts to."""
        moved = self._swapper.num_moves
        return Load(self._prefill_tokens, self._prefill_keys, self._decodes, self._decode_keys, moved)

    def cached(self, request: Request) -> int:
        """Tokens a prefix hit would save a waiting request. A peek; changes nothing."""
        return 0 if request.blocks or request.host_blocks else self._blocks.cached(request)

    def missing(self, request: Request) -> int:
        """Blocks that must still become free before all tokens of a waiting request fit, beside what the prompts of this
        step still need; 0 or less: they fit. A peek; changes nothing."""
        size = self._blocks.block_size
        short = -(-len(request.tokens) // size) + self._promised // size - self._blocks.num_free
        if short > 0:
            parent = self._parent(request)
            short -= (self.cached(request) if parent is None else parent.num_computed) // size
        return short

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Whom the preemption policy would send back. Changes nothing."""
        return self._swapper.policy.victim(candidates, self)

    def fits(self, request: Request, seconds: float) -> int:
        """How many tokens of the request can join the step before it is expected to take more than `seconds`."""
        start = request.num_computed or (0 if request.id in self._running else self.cached(request))
        return self.cost.fits(self.load, start, seconds)

    def explain(self, request: Request, reason: str) -> None:
        """Say why a request waits, or why it was preempted that way. Shown in the step log and by `why`."""
        before = self.reasons.get(request.id, "")
        if reason not in before:
            self.reasons[request.id] = f"{before}; {reason}" if before else reason

    def take(self, request: Request, limit: int | None = None) -> int:
        """Add up to `limit` of the request's pending tokens to the step, admitting it if it waits.

        Returns how many; 0 when the budget, the seats or the blocks have run out. All or nothing in blocks.
        Raises ContractError for a request that is already in this step, was preempted in it, or is not the engine's.
        """
        rid, left = request.id, self.tokens_left
        if not self._open or rid in self._chunks or rid in self._preempted or (limit is not None and limit < 1):
            raise ContractError(self._broken("take", rid, limit))
        running = self._running.get(rid) is request
        if not running and self._waiting.get(rid) is not request:
            raise ContractError(self._broken("take", rid, limit))
        if left <= 0 or (not running and self.seats_left <= 0):
            self.reasons[rid] = "the step's tokens are all taken" if left <= 0 else "every seat is taken"
            return 0
        scored = request.sampling.prompt_logprobs is not None and request.num_scored < request.num_prompt - 1
        if not running and not request.host_blocks and not scored:  # a cached prefix has no logits to score
            self._attach(request)
        start, pending = request.num_computed, len(request.tokens) - request.num_computed
        count = min(pending, left, limit or pending, SCORED_CHUNK if scored else pending)
        if not (self._blocks.grow(request, start + count) or self._reclaim(request, start + count)):
            if not running:
                self._withdraw(request)
            self.reasons[rid] = "out of blocks"
            return 0
        request.room = len(request.blocks) * self._blocks.block_size
        if not running:
            self._swapper.bring_back(request)
            self._attached.append(request)
            self.seats_left -= 1
        self._chunks[rid] = Chunk(request, start, count, count == pending and request.sampling.max_tokens > 0)
        self.tokens_left = left - count
        if count == 1:
            self._decodes += 1
            self._decode_keys += start + 1
        else:
            self._prefill_tokens += count
            self._prefill_keys += count * start + count * (count + 1) // 2
            self._promised += pending - count
        return count

    def take_all(self, queue: deque[Request], limit: int | None = None) -> Request | None:
        """`take` one request after the other, from the left, and remove it from the queue. Stops at
        the first that finds no room, removed as well, and returns it; None: the queue is empty. The cheap way to let
        many streams go on."""
        chunks, running, preempted, size = self._chunks, self._running, self._preempted, self._blocks.block_size
        while queue:
            request = queue.popleft()
            rid, start, left = request.id, request.num_computed, self.tokens_left
            decode = len(request.tokens) - start == 1 and running.get(rid) is request and left > 0 and self._open
            if not decode or rid in chunks or rid in preempted:
                if self.take(request, limit):
                    continue
                return request
            if start >= request.room:
                if not (self._blocks.grow(request, start + 1) or self._reclaim(request, start + 1)):
                    self.reasons[rid] = "out of blocks"
                    return request
                request.room = len(request.blocks) * size
            chunks[rid] = _new(Chunk, (request, start, 1, request.sampling.max_tokens > 0))
            self.tokens_left = left - 1
            self._decodes += 1
            self._decode_keys += start + 1
        return None

    def admit(self, request: Request, limit: int | None = None) -> int:
        """Take a waiting request, but only if nothing is `missing`: what doesn't fit whole is begun only to be thrown
        away. Nor after a preemption in this step: the room just made is not for others. Where nothing runs, it is
        `take`. Returns the tokens taken; 0: nobody after it should be admitted either, or it may wait for ever.
        """
        if self._preempted:
            self.reasons[request.id] = "others were preempted in this step"
            return 0
        if (self._running or self._chunks) and (missing := self.missing(request)) > 0:
            self.reasons[request.id] = f"out of blocks: {missing} more must become free"
            return 0
        return self.take(request, limit)

    def insist(
        self,
        request: Request,
        *pools: MutableSequence[Request],
        limit: int | None = None,
        victim: Callable[[Sequence[Request], Draft], Request] | None = None,
    ) -> int:
        """Take, preempting others while blocks are short: victims come from the first pool, then the next, each picked
        by `victim`, else by the preemption policy, and removed from its pool. A running request that finds none gives
        way itself.

        Returns the tokens taken, as `take` does. Pools hold running requests that are not in this step yet.
        """
        while not (count := self.take(request, limit)):
            if self.tokens_left <= 0 or (request.id not in self._running and self.seats_left <= 0):
                return 0
            pool = next((pool for pool in pools if pool), None)
            if pool is None:
                if request.id in self._running:
                    self.preempt(request)
                return 0
            chosen = (victim or self._swapper.policy.victim)(tuple(pool), self) if len(pool) > 1 else pool[0]
            if chosen not in pool:
                raise ContractError(f"the victim {getattr(chosen, 'id', chosen)!r} is none of the candidates")
            pool.remove(chosen)
            self.preempt(chosen)
            self.explain(chosen, f"preempted to make room for {request.id}")
        return count

    def preempt(self, request: Request, mode: PreemptMode | None = None) -> None:
        """Send a running request back to wait and give its blocks back. `mode` None: what `preemption=` says.

        Raises ContractError for a request that is in this step already or is not running.
        """
        rid = request.id
        if not self._open or rid in self._chunks or rid in self._preempted or self._running.get(rid) is not request:
            raise ContractError(self._broken("preempt", rid, None))
        self._swapper.preempt(request, mode, self)
        self._preempted[rid] = request
        self.seats_left += 1

    def freeze(self) -> Step:
        """Close the draft. The core calls it; afterwards `take` and `preempt` raise."""
        self._open = False
        out, back = self._swapper.moves()
        copies: tuple[Move, ...] = ()
        if self._sharing is not None:
            moves = self._sharing.moves()
            first = self._swapper.num_blocks  # the manager's host blocks lie behind those for preempted requests
            out += tuple(Move(m.source, m.target + first) for m in moves.out)
            back += tuple(Move(m.source + first, m.target) for m in moves.back)
            copies = moves.copies
        return Step(tuple(self._chunks.values()), tuple(self._preempted.values()), out, copies, back)

    def undo(self) -> list[Request]:
        """Give back what the draft took, after a fault of the scheduler. Returns the running requests that lost their
        blocks and must start over; every waiting request is as it was."""
        self._open = False
        for request in self._attached:
            self._withdraw(request)
        lost = [c.request for c in self._chunks.values() if c.request.id in self._running]
        for request in lost:
            self._blocks.release(request)
            request.room = 0
        self._swapper.undo()
        if self._sharing is not None:
            self._sharing.moves()  # handed out already when the step was frozen before the fault
            self._sharing.settle(False)
        return lost + list(self._preempted.values())

    def _attach(self, request: Request) -> None:
        """Give a request the blocks of its parent, if that is there and begins alike; else those of a cached prefix."""
        if self._sharing is not None and (parent := self._parent(request)) is not None:
            shared = min(parent.num_computed, len(request.tokens) - 1)
            if shared and parent.tokens[:shared] == request.tokens[:shared]:
                self._sharing.fork(parent, request, shared)
                parent.room = 0  # whoever writes to the last shared block gets a copy
                return
        self._blocks.attach(request)

    def _parent(self, request: Request) -> Request | None:
        """Whom the request would share blocks with."""
        if request.parent is None or self._sharing is None:
            return None
        parent = self._running.get(request.parent) or self._kept.get(request.parent)
        return parent if parent is not None and parent.blocks and parent.salt == request.salt else None

    def _reclaim(self, request: Request, num_tokens: int) -> bool:
        """Out of blocks: give up what finished requests keep, the oldest first, until the request has room."""
        while self._kept:
            self._blocks.release(self._kept.pop(next(iter(self._kept))))
            if self._blocks.grow(request, num_tokens):
                return True
        return False

    def _withdraw(self, request: Request) -> None:
        """Free a waiting request's blocks; what it has in host memory stays good."""
        computed = request.num_computed if request.host_blocks else 0
        self._blocks.release(request)
        request.num_computed, request.room = computed, 0

    def _broken(self, call: str, rid: str, limit: int | None) -> str:
        if not self._open:
            return f"draft.{call}({rid!r}) after the step was closed: a draft is good for one call of schedule"
        if limit is not None and limit < 1:
            return f"draft.take({rid!r}, limit={limit}): limit must be at least 1"
        if rid in self._chunks:
            return f"draft.{call}({rid!r}): the request is already in this step"
        if rid in self._preempted:
            return f"draft.{call}({rid!r}): the request was preempted in this step"
        where = "running" if call == "preempt" else "waiting or running"
        return f"draft.{call}({rid!r}): no such request is {where} in this engine; it may have finished"
