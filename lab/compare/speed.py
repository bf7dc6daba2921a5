"""How fast B is beside A: both in the same minutes, in turns, so that what the machine does meanwhile cancels.

Rounds go A B, B A, A B, …; each round gives one ratio B / A per measure. What is shown is their geometric mean and a confidence
interval from Student's t on the logarithms: the spread between rounds is the noise that is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from turnout.lab.compare.sides import Item, Side, Speed

RACE_TOKENS = 1024  # more take minutes on a CPU; turnout bench measures loads
MIN_ROUNDS = 2


class Ratio(NamedTuple):
    """B / A."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Race:
    """All rounds of A and one B."""

    a: str
    b: str
    rounds: list[tuple[Speed, Speed]] = field(default_factory=list)

    def ratios(self, confidence: float = 0.95) -> Mapping[str, Ratio]:
        """By measure: output tokens/s, median TTFT, median and p99 ITL. Empty before two rounds."""
        if len(self.rounds) < MIN_ROUNDS:
            return {}
        return {name: _ratio([(of(a), of(b)) for a, b in self.rounds], confidence) for name, of in MEASURES.items()}


def _throughput(speed: Speed) -> float:
    return speed.num_tokens / speed.seconds


def _quantile(values: Sequence[float], q: float) -> float:
    return float(np.quantile(values, q)) if values else math.nan


MEASURES: Mapping[str, Callable[[Speed], float]] = {
    "output tokens/s": _throughput,
    "TTFT p50": lambda speed: _quantile(speed.ttft, 0.5),
    "ITL p50": lambda speed: _quantile(speed.itl, 0.5),
    "ITL p99": lambda speed: _quantile(speed.itl, 0.99),
}


def _ratio(pairs: Sequence[tuple[float, float]], confidence: float) -> Ratio:
    from scipy import stats

    logs = np.log([b / a for a, b in pairs])
    mean, num = float(logs.mean()), len(logs)
    reach = float(stats.t.ppf((1 + confidence) / 2, num - 1)) * float(logs.std(ddof=1)) / math.sqrt(num)
    return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def _some(items: Sequence[Item]) -> Sequence[Item]:
    parts = (items[::step] for step in range(1, len(items) + 1))
    return next((part for part in parts if sum(len(item.prompt) for item in part) <= RACE_TOKENS), items[:1])


def race(
    a: Side,
    others: Sequence[Side],
    items: Sequence[Item],
    max_tokens: int,
    rounds: int,
    on_progress: Callable[[str, float], None] = lambda stage, share: None,
) -> list[Race]:
    """Time A and each of `others` in turns, after one round to warm up. `rounds` 0: nothing is timed.

    Of the items, as many evenly chosen ones run as have RACE_TOKENS prompt tokens together.
    """
    items = _some(items)
    races = [Race(a.name, b.name) for b in others]
    for number in range(rounds + 1 if rounds else 0):
        on_progress(f"race, round {number} of {rounds}" if number else "race, warming up", number / (rounds + 1))
        for b, found in zip(others, races, strict=True):
            first, second = (a, b) if number % 2 else (b, a)
            one, two = first.race(items, max_tokens), second.race(items, max_tokens)
            if number:
                found.rounds.append((one, two) if first is a else (two, one))
    return races
