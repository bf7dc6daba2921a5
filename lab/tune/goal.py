"""What is wanted, and which of two results is nearer to it. It knows no engine.

Bounds come first: a result that breaks them less is better. Of two that keep them, the one with more output tokens a second is
better; of two as fast, the one with more room under the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BOUNDED = ("ttft", "itl", "e2e")


@dataclass
class Goal:
    """Seconds at p99; null: any. Without a bound, only throughput counts. Raises ValueError naming the option."""

    ttft_p99: float | None = None
    itl_p99: float | None = None
    e2e_p99: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ValueError(f"target.{name} must be above 0, or null, got {value}")

    @property
    def bounds(self) -> dict[str, float]:
        """By measure."""
        given = {name: getattr(self, f"{name}_p99") for name in BOUNDED}
        return {name: bound for name, bound in given.items() if bound is not None}


class Outcome(NamedTuple):
    """What came of a run."""

    output_tokens: float  # a second
    p99: dict[str, float]  # seconds, by measure
    good: bool = True  # False: requests failed


def worst(outcome: Outcome, goal: Goal) -> float:
    """The largest p99 divided by its bound; at most 1 where all are kept, 0 where there is none."""
    return max((outcome.p99[name] / bound for name, bound in goal.bounds.items()), default=0.0)


def better(one: Outcome, other: Outcome, goal: Goal, gain: float) -> bool:
    """Whether `one` is nearer to the goal by at least `gain`, relative, in the first thing they differ in by so much."""
    if one.good != other.good:
        return one.good
    mine, theirs = worst(one, goal), worst(other, goal)
    broken = (max(mine, 1.0), max(theirs, 1.0))
    if _apart(*broken, gain):
        return broken[0] < broken[1]
    if _apart(one.output_tokens, other.output_tokens, gain):
        return one.output_tokens > other.output_tokens
    return _apart(mine, theirs, gain) and mine < theirs


def _apart(a: float, b: float, gain: float) -> bool:
    return max(a, b) > min(a, b) * (1 + gain)
