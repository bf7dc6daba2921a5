"""Which request is to be sent when. It sends nothing and reads no clock.

    open loop     the workload's own times; an engine that falls behind is asked all the same
    closed loop   a number of clients, each of which asks again as soon as it was answered

What follows from an answer (`Arrival.then`), such as a session's next turn, comes when it was given, in both.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from turnout.core.types import Request
from turnout.lab.workload.arrivals import Arrival, Workload


class PlannedRequest(NamedTuple):
    """One request to send."""

    at: float  # seconds after the load began: latency counts from here, whenever it is really sent
    request: Request  # of the workload: its tokens stand for others, see prompts.py
    recorded: Sequence[int] | None  # what it said when it was recorded; then its tokens are real
    before: Request | None  # the one whose prompt and answer it goes on from


class _Entry(NamedTuple):
    at: float
    number: int
    arrival: Arrival
    after: Request | None  # the request whose answer brought it; None: from the workload's own list


class OfferedLoad:
    """The requests of a workload. Ask `due` whenever time has passed, tell `answered` whenever one has ended."""

    def __init__(self, arrivals: Iterator[Arrival], clients: int | None = None, limit: float = math.inf) -> None:
        """`clients`: a closed loop of so many; None: at the arrivals' times. After `limit` seconds nothing is sent."""
        self._arrivals, self._closed, self._limit = arrivals, clients is not None, limit
        self._queue: list[_Entry] = []
        self._open: dict[str, Arrival] = {}
        self._number = 0
        self.last_planned = 0.0  # of those sent
        self.cut = False  # there was more to send when the limit was over
        for _ in range(clients or 1):
            self._fetch(0.0)

    @property
    def next_at(self) -> float:
        """When the next request is due; infinity: not before something is answered, if at all."""
        return self._queue[0].at if self._queue else math.inf

    def due(self, now: float) -> list[PlannedRequest]:
        """Everything planned up to now, in order."""
        found: list[PlannedRequest] = []
        while self._queue and self._queue[0].at <= now:
            at, _, arrival, after = heapq.heappop(self._queue)
            request = arrival.request
            if after is None and not self._closed:
                self._fetch(now)
            self.last_planned = max(self.last_planned, at)
            self._open[request.id] = arrival
            before = after if after is not None and _continues(request, after) else None
            found.append(PlannedRequest(at, request, arrival.answer, before))
        return found

    def answered(self, request_id: str, now: float) -> bool:
        """It has ended, well or not. Whether a later prompt goes on from it."""
        arrival = self._open.pop(request_id)
        follow = arrival.then(now) if arrival.then is not None else None
        if follow is not None:
            self._push(follow, follow.request.arrived, arrival.request)
            return _continues(follow.request, arrival.request)
        if self._closed:
            self._fetch(now)
        return False

    def _fetch(self, now: float) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._push(arrival, now if self._closed else arrival.request.arrived, None)

    def _push(self, arrival: Arrival, at: float, after: Request | None) -> None:
        if at > self._limit:
            self.cut = True
            return
        self._number += 1
        heapq.heappush(self._queue, _Entry(at, self._number, arrival, after))


def _continues(request: Request, before: Request) -> bool:
    """Whether a prompt begins with another and its answer, as the turns of a session do."""
    rest = before.tokens
    return len(request.tokens) > len(rest) + before.sampling.max_tokens and request.tokens[: len(rest)] == rest


class First:
    """The first requests of a workload, and nothing that follows from them: to warm up with."""

    def __init__(self, workload: Workload, num_requests: int) -> None:
        self._workload, self._num = workload, num_requests

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        """See Workload."""
        for arrival in itertools.islice(self._workload.arrivals(factor, seats), self._num):
            yield arrival._replace(then=None)
