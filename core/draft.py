"""What a scheduler sees of the step being written. It holds nothing and decides nothing: `builder.py` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from turnout.core.builder import StepBuilder
from turnout.core.cost import Load, StepCost
from turnout.core.types import PreemptMode, RequestView

_new = tuple.__new__  # a named tuple in half the time


class Taken(NamedTuple):
    """`num_tokens` tokens of one request, in the step."""

    request: RequestView
    num_tokens: int
    samples: bool  # it gets a new token


class Draft:
    """What a scheduler writes into: good for one call of `schedule`, on the engine's thread.

    A call that breaks a rule raises ContractError, and the step is undone.
    """

    __slots__ = ("__builder",)

    def __init__(self, builder: StepBuilder) -> None:
        self.__builder = builder

    @property
    def now(self) -> float:
        """Seconds on the engine's clock: the only time a scheduler may look at."""
        return self.__builder.now

    @property
    def tokens_left(self) -> int:
        """Tokens that still fit into the step; 0: nothing more can be taken."""
        return self.__builder.tokens_left

    @property
    def seats_left(self) -> int:
        """Requests that can still be admitted."""
        return self.__builder.seats_left

    @property
    def blocks_free(self) -> int:
        """Blocks of the cache that can still be handed out."""
        return self.__builder.blocks.num_free

    @property
    def host_blocks_free(self) -> int:
        """Blocks of host memory that a victim's can still be swapped to."""
        return self.__builder.swapper.num_free

    @property
    def preempted(self) -> list[RequestView]:
        """Whom this step sends back to wait. When there are any, admitting others would take the blocks just freed."""
        return [request.view for request in self.__builder.preempted.values()]

    @property
    def taken(self) -> list[Taken]:
        """What was taken so far, in order."""
        taken = self.__builder.chunks.values()
        return [_new(Taken, (request.view, count, samples)) for request, _, count, samples in taken]

    @property
    def load(self) -> Load:
        """What that amounts to."""
        return self.__builder.load

    @property
    def cost(self) -> StepCost:
        """What steps cost here, learned from finished ones."""
        return self.__builder.cost.estimate

    @property
    def reasons(self) -> Mapping[str, str]:
        """By request id: why it waits, or was preempted that way, as far as was said."""
        return MappingProxyType(self.__builder.reasons)

    def cached(self, request: RequestView) -> int:
        """Tokens a prefix hit would save a waiting request. A peek; changes nothing."""
        return self.__builder.cached(self.__builder.find(request))

    def missing(self, request: RequestView) -> int:
        """Blocks that must still become free before all tokens of a waiting request fit, beside what the prompts of this
        step still need; 0 or less: they fit. A peek; changes nothing."""
        return self.__builder.missing(self.__builder.find(request))

    def victim(self, candidates: Sequence[RequestView]) -> RequestView:
        """Whom the preemption policy would send back. Changes nothing."""
        return self.__builder.swapper.policy.victim(candidates, self)

    def fits(self, request: RequestView, seconds: float) -> int:
        """How many tokens of the request can join the step before it is expected to take more than `seconds`."""
        builder = self.__builder
        start = request.num_computed or (0 if request.id in builder.running else self.cached(request))
        builder.fitted = True
        return builder.cost.estimate.fits(builder.load, start, seconds)

    def explain(self, request: RequestView, reason: str) -> None:
        """Say why a request waits, or why it was preempted that way. Shown in the step log and by `why`."""
        self.__builder.explain(request.id, reason)

    def wait(self, request: RequestView, until: float, reason: str) -> None:
        """Leave a request out on purpose, until that second of `now`, and say why.

        While nothing else runs the engine sleeps as long; a scheduler that runs nothing and never said so is broken.
        """
        self.__builder.wait(request.id, until, reason)

    def take(self, request: RequestView, limit: int | None = None) -> int:
        """Add up to `limit` of the request's pending tokens to the step, admitting it if it waits.

        Returns how many; 0 when the budget, the seats or the blocks have run out. All or nothing in blocks.
        Raises ContractError for a request that is already in this step, was preempted in it, or is not the engine's.
        """
        return self.__builder.take(request, limit)

    def run(
        self,
        requests: Collection[RequestView],
        *,
        spare: Collection[RequestView] = (),
        limit: int | None = None,
        victim: Callable[[Sequence[RequestView], Draft], RequestView] | None = None,
    ) -> int:
        """Take running requests in order, each up to `limit` tokens, as far as the budget goes.

        Out of blocks, others are preempted: first those of `spare`, then those behind it in `requests`, which of them
        `victim` says, else the preemption policy. One that finds nobody gives way itself. Those that gave way earlier
        in this step are passed over. Returns the tokens taken.
        """
        return self.__builder.run(requests, spare, limit, victim or self.__builder.swapper.policy.victim, self)

    def admit(self, request: RequestView, limit: int | None = None) -> int:
        """Take a waiting request, but only if nothing is `missing`: what doesn't fit whole is begun only to be thrown
        away. Nor after a preemption in this step: the blocks just freed are not for others. Where nothing runs, it is
        `take`. Returns the tokens taken; 0: nobody after it should be admitted either, or it may wait for ever.
        """
        return self.__builder.admit(request, limit)

    def preempt(self, request: RequestView, mode: PreemptMode | None = None) -> None:
        """Send a running request back to wait and give its blocks back. `mode` None: what `preemption=` says.

        Raises ContractError for a request that is in this step already or is not running.
        """
        self.__builder.preempt(request, mode, self)
