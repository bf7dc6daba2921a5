"""The highest request rate that keeps p99 under its bounds, by bisection. Each probe is a whole simulation.

A rate the engine can't keep up with is too high, whatever the bounds: more than BEHIND of the requests were passed over
by the last step before the last one arrives. With a limit on what runs at once the gaps between tokens alone would never tell. A probe ends early once so many values are above a bound that no later one can bring p99 back under it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from turnout.lab.simulate.record import SimulationRecord

FARTHEST = 4096  # times the workload's own rate, and as small a part of it
SHARE = 0.99
BEHIND = 0.05  # of all requests

Probe = Callable[
    [float, dict[str, int]], SimulationRecord
]  # (rate, values that may be above each bound) -> what came of it


class CapacityResult(NamedTuple):
    """What the search came to."""

    rate: float | None  # requests a second; None: no rate keeps the bounds
    fails_at: float | None  # the lowest rate seen to break one; None: even the highest tried keeps them
    record: SimulationRecord  # of the run at `rate`; of the last one where there is none
    probes: list[tuple[float, bool]]  # every rate tried and whether it kept the bounds


def search(probe: Probe, first: SimulationRecord, rate: float, precision: float) -> CapacityResult:
    """`first` is the whole run at `rate`, from which the search goes up or down."""
    allowed = {name: _allowed(getattr(first, name).count) for name in first.bounds}
    probes, records = [(rate, keeps(first))], {rate: first}

    def holds(rate: float) -> bool:
        record = probe(rate, allowed)
        probes.append((rate, keeps(record)))
        records[rate] = record
        return probes[-1][1]

    low, high = (rate, math.inf) if keeps(first) else (0.0, rate)
    while high == math.inf and low < rate * FARTHEST:
        low, high = (low * 2, high) if holds(low * 2) else (low, low * 2)
    while low == 0.0 and high > rate / FARTHEST:
        low, high = (high / 2, high) if holds(high / 2) else (low, high / 2)
    while low > 0.0 and high < math.inf and high / low > 1.0 + precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    best = low if low > 0.0 else None
    return CapacityResult(best, None if high == math.inf else high, records[best or probes[-1][0]], probes)


def keeps(record: SimulationRecord) -> bool:
    """Whether p99 of everything bounded is under its bound, and the engine keeps up."""
    if record.hopeless or record.num_behind > max(1, BEHIND * record.num_added):
        return False
    return all(getattr(record, n).over <= _allowed(getattr(record, n).count) for n in record.bounds)


def _allowed(count: int) -> int:
    """How many of `count` values may be above p99."""
    return count - math.ceil(SHARE * count - 1e-9)


def describe(found: CapacityResult) -> dict[str, Any]:
    """As plain values."""
    return {
        "rate": found.rate,
        "fails_at": found.fails_at,
        "bounds_p99": dict(found.record.bounds),
        "probes": [{"rate": rate, "keeps": kept} for rate, kept in found.probes],
    }
