"""Distributions and time lines in bounded memory, however long the simulated day is."""

from __future__ import annotations

import math
from collections.abc import Iterable

EXACT = 20_000  # distinct values kept as they are; beyond, they fall into buckets
WIDTH = math.log(1.01)  # of a bucket: 1 %
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
POINTS = 1024  # of a time line, about


class Spread:
    """A distribution of seconds: exact to the nanosecond up to EXACT distinct values, then in buckets of 1 %."""

    def __init__(self, bound: float = math.inf) -> None:
        self.count, self.total, self.most = 0, 0.0, 0.0
        self.bound, self.over = bound, 0  # how many values are above the bound; never rounded
        self._counts: dict[float, int] = {}
        self._coarse = False

    def add(self, value: float, count: int = 1) -> None:
        self.count += count
        self.total += value * count
        self.most = max(self.most, value)
        if value > self.bound:
            self.over += count
        key = _bucket(value) if self._coarse else round(value, 9)
        counts = self._counts
        counts[key] = counts.get(key, 0) + count
        if len(counts) > EXACT and not self._coarse:
            self._coarse = True
            old, self._counts = counts, {}
            for exact, times in old.items():
                key = _bucket(exact)
                self._counts[key] = self._counts.get(key, 0) + times

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """The smallest value that at least each share of the values does not exceed (nearest rank). Shares ascend."""
        found: list[float] = []
        seen, wanted = 0, [max(1, math.ceil(share * self.count - 1e-9)) for share in shares]
        for value, count in sorted(self._counts.items()):
            seen += count
            while len(found) < len(wanted) and seen >= wanted[len(found)]:
                found.append(value)
        return found + [0.0] * (len(wanted) - len(found))

    def quantile(self, share: float) -> float:
        return self.quantiles([share])[0]

    def summary(self) -> dict[str, float]:
        """Mean, percentiles and maximum in seconds."""
        values = dict(zip(QUANTILES, self.quantiles(QUANTILES.values()), strict=True))
        return {"mean": round(self.mean, 9)} | values | {"max": round(self.most, 9)}


def _bucket(value: float) -> float:
    """The middle of the bucket that holds the value."""
    return math.exp((math.floor(math.log(value) / WIDTH) + 0.5) * WIDTH) if value > 1e-9 else 0.0


class Timeline:
    """Gauges over time, thinned out as it grows: at most 2 * POINTS points, evenly far apart."""

    def __init__(self, *names: str) -> None:
        self.names = ("time", *names)
        self._points: list[tuple[float, ...]] = []
        self._stride, self._next = 0.0, 0.0

    def add(self, time: float, *values: float) -> None:
        if time < self._next:
            return
        self._points.append((round(time, 6), *values))
        if len(self._points) >= 2 * POINTS:
            self._points = self._points[::2]
            self._stride = (time - self._points[0][0]) / POINTS
        self._next = time + self._stride

    def columns(self) -> dict[str, list[float]]:
        return {name: [point[i] for point in self._points] for i, name in enumerate(self.names)}
