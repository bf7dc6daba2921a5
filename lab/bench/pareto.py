"""Which points of a sweep nobody beats. It knows only pairs of numbers."""

from __future__ import annotations

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float] | None]) -> list[bool]:
    """Of (throughput, latency) pairs, whether no other has at least the throughput at no more latency and is better in one.
    None: nothing was measured there. Equal points stand or fall together."""

    def beaten(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return other[0] >= one[0] and other[1] <= one[1] and other != one

    known = [point for point in points if point is not None]
    return [point is not None and not any(beaten(point, other) for other in known) for point in points]
