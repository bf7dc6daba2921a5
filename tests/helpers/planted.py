"""Faults that allocators are known to have, planted in ours: what the fuzzer must find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, Finish, PreemptMode, Request, RequestView
from turnout.core.optional import BlockMoves
from turnout.core.swap import Swapper
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.preemption import Recompute


@dataclass
class DoubleFree(PagedBlocks):
    """Gives every block back twice: what another request holds too becomes free."""

    def release(self, request: Request) -> None:
        held = list(request.blocks)
        super().release(request)
        request.blocks.extend(held)
        super().release(request)


@dataclass
class MissedRelease(PagedBlocks):
    """Forgets the blocks of whoever is aborted."""

    def release(self, request: Request) -> None:
        if request.finish is not Finish.ABORT:
            super().release(request)


@dataclass
class StaleCount(PagedBlocks):
    """Remembers how much of a prompt was cached, and believes it when that was evicted."""

    def start(self, num_blocks: int) -> None:
        super().start(num_blocks)
        self._counts: dict[tuple[object, ...], int] = {}

    def attach(self, request: Request) -> None:
        super().attach(request)
        prompt = (request.salt, *request.tokens)
        request.num_computed = self._counts[prompt] = max(request.num_computed, self._counts.get(prompt, 0))


@dataclass
class NoCopyOnWrite(PagedBlocks):
    """Writes into a part-full block that others hold."""

    def grow(self, request: Request, num_tokens: int) -> bool:
        self._forked.discard(request.id)
        return super().grow(request, num_tokens)


@dataclass
class ForgottenCopy(PagedBlocks):
    """Gives whoever writes into a shared block another one, without what was in it."""

    def moves(self) -> BlockMoves:
        return super().moves()._replace(copies=())


@dataclass
class NoSalt(PagedBlocks):
    """Shares prefixes whatever the salt."""

    def cached(self, request: Request) -> int:
        salt, request.salt = request.salt, None
        found = super().cached(request)
        request.salt = salt
        return found

    def attach(self, request: Request) -> None:
        salt, request.salt = request.salt, None
        super().attach(request)
        request.salt = salt

    def publish(self, request: Request) -> None:
        salt, request.salt = request.salt, None
        super().publish(request)
        request.salt = salt


@dataclass
class EarlyPublish(PagedBlocks):
    """Lets others find blocks that are about to be computed."""

    def grow(self, request: Request, num_tokens: int) -> bool:
        if not super().grow(request, num_tokens):
            return False
        computed, request.num_computed = request.num_computed, num_tokens
        self.publish(request)
        request.num_computed = computed
        return True


@dataclass
class OffByOne(PagedBlocks):
    """Has a block too few when the last token begins one."""

    def grow(self, request: Request, num_tokens: int) -> bool:
        return super().grow(request, num_tokens - 1)


@dataclass
class UnlockedTier(PagedBlocks):
    """Writes into a block of the host tier that the same step has yet to read."""

    def attach(self, request: Request) -> None:
        super().attach(request)
        if self._tier is not None:
            self._tier.unlock()


@dataclass
class FailedButSettled(PagedBlocks):
    """Takes the moves of a step that failed for done."""

    def settle(self, happened: bool) -> None:
        super().settle(True)


class EagerSwapper(Swapper):
    """Frees the host blocks of a swapped request before they were read."""

    def bring_back(self, request: Request) -> None:
        super().bring_back(request)
        self.drop(request)


@dataclass
class TakesTurns:
    """Lets two requests push each other out for ever."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        for request in running:
            if waiting or not draft.take(request):
                draft.preempt(request)
        if not running:
            for request in waiting:
                draft.take(request, 1)


@dataclass
class Prefers(Recompute):
    """No fault: an option that is an enumeration."""

    preferred: PreemptMode = PreemptMode.RECOMPUTE

    def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
        return self.preferred
