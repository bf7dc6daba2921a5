"""A workload as the simulator sees it: requests in order of time, made when they are due. It knows no engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from turnout.core.types import Request, Sampling

FILLER = 0  # the token where nobody recorded one
VOCAB_SIZE = 2**31 - 1  # of the simulated model: ids fit the int32 arrays of block managers
NO_LABELS: Mapping[str, str] = {}


class Arrival(NamedTuple):
    """A request that arrives at `request.arrived`."""

    request: Request
    answer: Sequence[int] | None = None  # what it says, where that was recorded
    then: Callable[[float], Arrival | None] | None = None  # when it has finished: what its client sends next


class Workload(Protocol):
    """A dataclass whose fields are its options."""

    def asked(self, factor: float, num_requests: int, seconds: float) -> float | None:
        """Requests a second that come, where so many came in that time; None: as many as are answered."""
        ...

    def notes(self) -> list[str]:
        """What to know of the requests made so far, a sentence each."""
        ...

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        """Every request, in order of time from second 0, `factor` times as often; `seats` requests run at once.
        The same each time it is called."""
        ...


@lru_cache(maxsize=65536)
def sampling(num_output: int) -> Sampling:
    """Says `num_output` tokens."""
    return Sampling(temperature=0.0, max_tokens=num_output)


def prompt(unique: int, num_tokens: int) -> list[int]:
    """A prompt that shares its beginning with no other of another `unique`."""
    tokens = [FILLER] * num_tokens
    tokens[0] = 1 + unique % (VOCAB_SIZE - 1)
    return tokens


def in_order(arrivals: Iterable[tuple[Arrival, str]], window: int = 1000) -> Iterator[Arrival]:
    """Sort arrivals that are almost in order, holding `window` of them. Each comes with the name of its line.

    Raises ValueError naming the line that is further out of place than that.
    """
    heap: list[tuple[float, int, Arrival]] = []
    last = 0.0
    for number, (arrival, line) in enumerate(arrivals):
        at = arrival.request.arrived
        if at < last:
            raise ValueError(
                f"{line}: arrives {last - at:.3f} s before one more than {window} lines above; sort the file by time"
            )
        heapq.heappush(heap, (at, number, arrival))
        if len(heap) > window:
            last, _, first = heapq.heappop(heap)
            yield first
    while heap:
        yield heapq.heappop(heap)[2]
