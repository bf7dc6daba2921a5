"""The workload as both see it, the engine and the simulator: the same requests, lengths and clients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from turnout.lab.workload.arrivals import Arrival, Workload


class Same:
    """A workload whose clients and room do not depend on the composition that is tried. See Workload."""

    def __init__(self, workload: Workload, clients: int, max_requests: int, room: int) -> None:
        """`room`: tokens of prompt and answer; the end of a longer prompt is cut off."""
        self.inner, self._clients, self._num, self._room = workload, clients, max_requests, room

    def asked(self, factor: float, num_requests: int, seconds: float) -> float | None:
        return self.inner.asked(factor, num_requests, seconds)

    def notes(self) -> list[str]:
        return self.inner.notes()

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        left = itertools.count(1)

        def counted(arrival: Arrival) -> Arrival | None:
            if next(left) > self._num:
                return None
            request, then = arrival.request, arrival.then
            room = max(1, self._room - request.sampling.max_tokens)
            del request.tokens[room:]
            request.num_prompt = len(request.tokens)

            def follow(now: float) -> Arrival | None:
                assert then is not None
                following = then(now)
                return None if following is None else counted(following)

            return arrival._replace(then=follow if then is not None else None)

        for arrival in self.inner.arrivals(factor, self._clients):
            made = counted(arrival)
            if made is None:
                return
            yield made
