"""The step being written, and the rules of writing it. The engine owns it; a scheduler sees a `Draft` of it.

The token budget, the seats, the blocks, one chunk per request, whose request it is, which thread calls: all are checked
here. A rule that is broken is remembered, so that the step fails even where the policy swallows the exception, and
whatever was taken is given back whole by `undo`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING

from turnout.core.cost import CostModel, Load
from turnout.core.types import BlockMoves, Chunk, ContractError, Move, PreemptMode, Request, RequestView, Step

if TYPE_CHECKING:
    from turnout.core.draft import Draft
    from turnout.core.interfaces import BlockManager
    from turnout.core.optional import SharingBlocks
    from turnout.core.swap import Swapper
    from turnout.core.types import EngineInfo

    Victim = Callable[[Sequence[RequestView], Draft], RequestView]

_new = tuple.__new__  # a named tuple in half the time
SCORED_CHUNK = 256  # tokens; scoring a prompt needs logits for each of them, vocab_size floats a token


class StepBuilder:
    """Good for one step: made before the scheduler is called, closed or undone after it."""

    def __init__(
        self,
        blocks: BlockManager,
        sharing: SharingBlocks | None,
        swapper: Swapper,
        waiting: Mapping[str, Request],
        running: Mapping[str, Request],
        kept: dict[str, Request],
        cost: CostModel,
        info: EngineInfo,
        now: float,
    ) -> None:
        self.blocks, self._sharing, self.swapper = blocks, sharing, swapper
        self._waiting, self.running, self._kept = waiting, running, kept
        self.cost, self.fitted = cost, False  # whether the step was made to fit a time
        self.chunks: dict[str, Chunk] = {}
        self.preempted: dict[str, Request] = {}
        self.reasons: dict[str, str] = {}
        self.now, self.wait_until = now, -math.inf
        self.tokens_left = info.max_num_batched_tokens
        self.seats_left = info.max_num_seqs - len(running)  # a running request has its seat; admitting takes one
        self.fault: ContractError | None = None  # the first rule that was broken
        self._admitted: list[Request] = []
        self._open, self._thread = True, get_ident()
        self._moves: BlockMoves | None = None  # the block manager's, once the step is closed
        self._decodes = self._decode_keys = self._prefill_tokens = self._prefill_keys = 0
        self._promised = 0  # tokens that prompts of this step still have before them

    @property
    def load(self) -> Load:
        """What was taken so far."""
        moved = self.swapper.num_moves
        return Load(self._prefill_tokens, self._prefill_keys, self._decodes, self._decode_keys, moved)

    def find(self, view: RequestView) -> Request:
        """The engine's request that is seen. Raises ContractError."""
        request = self.running.get(view.id) or self._waiting.get(view.id)
        if request is None or request.view is not view:
            raise self._broken("of", view.id, "no such request is waiting or running in this engine")
        return request

    def cached(self, request: Request) -> int:
        """Tokens a prefix hit would save a waiting request."""
        return 0 if request.blocks or request.host_blocks else self.blocks.cached(request)

    def missing(self, request: Request) -> int:
        """See `Draft.missing`."""
        size = self.blocks.block_size
        short = -(-len(request.tokens) // size) + self._promised // size - self.blocks.num_free
        if short > 0:
            parent = self._parent(request)
            short -= (self.cached(request) if parent is None else parent.num_computed) // size
        return short

    def take(self, view: RequestView, limit: int | None = None) -> int:
        """See `Draft.take`."""
        rid, left = view.id, self.tokens_left
        self._may("take", rid, limit)
        request = self.running.get(rid)
        running = request is not None
        if request is None:
            request = self._waiting.get(rid)
        if request is None or request.view is not view:
            rule = "no such request is waiting or running in this engine; it may have finished"
            raise self._broken("take", rid, rule)
        if left <= 0 or (not running and self.seats_left <= 0):
            self.reasons[rid] = "the step's tokens are all taken" if left <= 0 else "every seat is taken"
            return 0
        scored = request.sampling.prompt_logprobs is not None and request.num_scored < request.num_prompt - 1
        if not running and not request.host_blocks and not scored:  # a cached prefix has no logits to score
            self._attach(request)
        start, pending = request.num_computed, len(request.tokens) - request.num_computed
        count = min(pending, left, limit or pending, SCORED_CHUNK if scored else pending)
        if not self._grow(request, start + count):
            if not running:
                self._withdraw(request)
            self.reasons[rid] = "out of blocks"
            return 0
        if not running:
            self.swapper.bring_back(request)
            self._admitted.append(request)
            self.seats_left -= 1
        self.chunks[rid] = Chunk(request, start, count, count == pending and request.sampling.max_tokens > 0)
        self.tokens_left = left - count
        if count == 1:
            self._decodes += 1
            self._decode_keys += start + 1
        else:
            self._prefill_tokens += count
            self._prefill_keys += count * start + count * (count + 1) // 2
            self._promised += pending - count
        return count

    def run(
        self,
        requests: Collection[RequestView],
        spare: Collection[RequestView],
        limit: int | None,
        victim: Victim,
        draft: Draft,
    ) -> int:
        """See `Draft.run`. A stream that needs no new block, nearly every one, is taken without a call."""
        chunks, preempted, running = self.chunks, self.preempted, self.running
        before = left = self.tokens_left
        keys = 0  # of the streams taken since the last call
        self._may("run", "", limit)
        for place, view in enumerate(requests):
            rid = view.id
            if preempted and rid in preempted:
                continue  # it gave way to one before it
            request = running.get(rid)
            if left > 0 and request is not None and request.view is view and rid not in chunks:
                start = request.num_computed
                if len(request.tokens) - start == 1 and (start < request.num_slots or self._grow(request, start + 1)):
                    chunks[rid] = _new(Chunk, (request, start, 1, request.sampling.max_tokens > 0))
                    left -= 1
                    keys += start + 1
                    continue
            self._count_decodes(left, keys)
            if not self.take(view, limit):
                behind = tuple(requests)[place + 1 :]
                if not self._make_room(view, spare, behind, limit, victim, draft):
                    return before - self.tokens_left
            left, keys = self.tokens_left, 0
        self._count_decodes(left, keys)
        return before - left

    def _count_decodes(self, left: int, keys: int) -> None:
        """`left`: tokens of the budget that streams have left, each of one token; `keys`: what they attend to."""
        self._decodes += self.tokens_left - left
        self._decode_keys += keys
        self.tokens_left = left

    def _make_room(
        self,
        view: RequestView,
        spare: Collection[RequestView],
        behind: Collection[RequestView],
        limit: int | None,
        victim: Victim,
        draft: Draft,
    ) -> bool:
        """Preempt others until the request finds blocks; it gives way itself when there is nobody. False: go no further."""
        running, out = view.id in self.running, (self.chunks, self.preempted)
        pools = [[v for v in pool if all(v.id not in those for those in out)] for pool in (spare, behind)]
        while self.tokens_left > 0 and (running or self.seats_left > 0):
            pool = pools[0] or pools[1]
            if not pool:
                if running:
                    self.preempt(view, None, draft)
                return running
            chosen = victim(tuple(pool), draft) if len(pool) > 1 else pool[0]
            if chosen not in pool:
                rule = f"the victim {getattr(chosen, 'id', chosen)!r} is none of the candidates"
                raise self._broken("run", view.id, rule)
            pool.remove(chosen)
            self.preempt(chosen, None, draft)
            self.explain(chosen.id, f"preempted to make room for {view.id}")
            if self.take(view, limit):
                return True
        return False

    def admit(self, view: RequestView, limit: int | None) -> int:
        """See `Draft.admit`."""
        if self.preempted:
            self.reasons[view.id] = "others were preempted in this step"
            return 0
        if (self.running or self.chunks) and (missing := self.missing(self.find(view))) > 0:
            self.reasons[view.id] = f"out of blocks: {missing} more must become free"
            return 0
        return self.take(view, limit)

    def preempt(self, view: RequestView, mode: PreemptMode | None, draft: Draft) -> None:
        """See `Draft.preempt`."""
        rid = view.id
        self._may("preempt", rid)
        request = self.running.get(rid)
        if request is None or request.view is not view:
            raise self._broken("preempt", rid, "no such request is running in this engine; it may have finished")
        self.swapper.preempt(request, mode, draft)
        self.preempted[rid] = request
        self.seats_left += 1

    def explain(self, rid: str, reason: str) -> None:
        before = self.reasons.get(rid, "")
        if reason not in before:
            self.reasons[rid] = f"{before}; {reason}" if before else reason

    def wait(self, rid: str, until: float, reason: str) -> None:
        """See `Draft.wait`."""
        self._may("wait", rid)
        if not math.isfinite(until):
            raise self._broken("wait", rid, f"until must be seconds on the engine's clock, got {until}")
        self.wait_until = until if self.wait_until <= self.now else min(self.wait_until, max(until, self.now))
        self.explain(rid, reason)

    def close(self) -> Step:
        """The step as it was written. Raises ContractError when a rule was broken on the way."""
        self._open = False
        if self.fault is not None:
            raise self.fault
        out, back = self.swapper.moves()
        copies: tuple[Move, ...] = ()
        if self._sharing is not None:
            self._moves = moves = self._sharing.moves()
            first = self.swapper.num_blocks  # the manager's host blocks lie behind those for preempted requests
            out += tuple(Move(m.source, m.target + first) for m in moves.out)
            back += tuple(Move(m.source + first, m.target) for m in moves.back)
            copies = moves.copies
        return Step(tuple(self.chunks.values()), tuple(self.preempted.values()), out, copies, back)

    def undo(self) -> list[Request]:
        """Give back what was taken, after a fault of the scheduler. Returns the running requests that lost their blocks
        and must start over: those preempted, or given a copy that is never made. Every other is as it was."""
        self._open = False
        for request in self._admitted:
            self._withdraw(request)
        targets = set[int]()  # blocks that were to become copies
        if self._sharing is not None:
            moves = self._moves or self._sharing.moves()  # handed out already when the fault came to light at the end
            self._sharing.settle(False)
            targets = {move.target for move in moves.copies}
        taken = (c.request for c in self.chunks.values())
        lost = [r for r in taken if r.id in self.running and not targets.isdisjoint(r.blocks)]
        for request in lost:
            self.blocks.release(request)
            request.num_slots = 0
        self.swapper.undo()
        return lost + list(self.preempted.values())

    def _attach(self, request: Request) -> None:
        """Give a request the blocks of its parent, if that is there and begins alike; else those of a cached prefix."""
        if self._sharing is not None and (parent := self._parent(request)) is not None:
            shared = min(parent.num_computed, len(request.tokens) - 1)
            if shared and parent.tokens[:shared] == request.tokens[:shared]:
                self._sharing.fork(parent, request, shared)
                parent.num_slots = 0  # whoever writes to the last shared block gets a copy
                return
        self.blocks.attach(request)

    def _parent(self, request: Request) -> Request | None:
        """Whom the request would share blocks with."""
        if request.parent is None or self._sharing is None:
            return None
        parent = self.running.get(request.parent) or self._kept.get(request.parent)
        return parent if parent is not None and parent.blocks and parent.salt == request.salt else None

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for so many tokens. Out of blocks, what finished requests keep is given up for them, the
        oldest first."""
        while not self.blocks.grow(request, num_tokens):
            if not self._kept:
                return False
            self.blocks.release(self._kept.pop(next(iter(self._kept))))
        request.num_slots = len(request.blocks) * self.blocks.block_size
        return True

    def _withdraw(self, request: Request) -> None:
        """Free a waiting request's blocks; what it has in host memory stays good."""
        computed = request.num_computed if request.host_blocks else 0
        self.blocks.release(request)
        request.num_computed, request.num_slots = computed, 0

    def _may(self, call: str, rid: str, limit: int | None = None) -> None:
        """Raises ContractError when the call breaks a rule that all calls share."""
        if not self._open:
            raise self._broken(call, rid, "after the step was closed: a draft is good for one call of schedule")
        if get_ident() != self._thread:
            raise self._broken(call, rid, "from another thread: a draft belongs to the engine's")
        if limit is not None and limit < 1:
            raise self._broken(call, rid, f"with limit={limit}: limit must be at least 1")
        if rid in self.chunks and call != "wait":
            raise self._broken(call, rid, "the request is already in this step")
        if rid in self.preempted and call != "wait":
            raise self._broken(call, rid, "the request was preempted in this step")

    def _broken(self, call: str, rid: str, rule: str) -> ContractError:
        broken = ContractError(f"draft.{call}({rid!r}): {rule}")
        self.fault = self.fault or broken
        return broken
