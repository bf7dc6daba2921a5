"""Samples as numbers, by the field's definitions. It measures nothing and knows no engine.

TTFT   planned time to first token           ITL   every gap between two deliveries of one request
TPOT   mean gap of a request after the first E2E   planned time to last token
late   planned time to when it was sent: what the generator itself is behind

A request that failed is counted as failed, by kind, and is in no latency, no throughput and no goodput.
The steady window begins when the first request has been answered and ends when the last one is sent: before it the
engine fills, after it the engine runs dry. A load too small to have one has no steady numbers.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnout.lab.bench.sample import Sample
from turnout.lab.simulate.config import Target
from turnout.lab.simulate.measure import QUANTILES, Spread

Values = dict[str, Any]
LATENCIES = ("ttft", "itl", "tpot", "e2e")


def summary(
    samples: Sequence[Sample], seconds: float, last_planned: float, target: Target, *, open_loop: bool
) -> Values:
    """One run. `seconds`: from its begin to its last answer; `last_planned`: when the last request was due."""
    good = [sample for sample in samples if sample.error is None]
    num_said, num_prompt = sum(s.num_said for s in good), sum(s.num_prompt for s in good)
    meeting = sum(_meets(sample, target) for sample in good)
    span = seconds or 1.0
    return {
        "requests": {
            "sent": len(samples),
            "finished": len(good),
            "failed": len(samples) - len(good),
            "short": sum(s.num_said < s.num_wanted for s in good),
            "errors": errors_of(samples),
        },
        "seconds": seconds,
        "offered": len(samples) / last_planned if last_planned and open_loop else None,
        "throughput": {
            "requests": len(good) / span,
            "output_tokens": num_said / span,
            "total_tokens": (num_said + num_prompt) / span,
        },
        "steady": _steady(good, last_planned),
        **latencies(good),
        "late": _spread(s.sent - s.planned for s in samples).summary(),
        "goodput": {
            "requests": meeting / span,
            "share": meeting / len(samples) if samples else 0.0,
            "target_ttft": target.ttft,
            "target_itl": target.itl,
        },
        "tokens": {"prompt": num_prompt, "cached": sum(s.num_cached for s in good), "output": num_said},
        "tenants": {name: latencies([s for s in good if s.tenant == name]) for name in _tenants(good)},
    }


def latencies(samples: Sequence[Sample]) -> Values:
    """The distributions of these requests, seconds."""
    said = [sample for sample in samples if sample.deliveries]
    found: dict[str, Iterable[float]] = {
        "ttft": (s.ttft for s in said),
        "itl": (gap for s in said for gap in s.itl),
        "tpot": (s.tpot for s in said if s.tpot is not None),
        "e2e": (s.e2e for s in said),
    }
    spreads = {name: _spread(values) for name, values in found.items()}
    return {name: spread.summary() | {"count": spread.count} for name, spread in spreads.items()}


def errors_of(samples: Iterable[Sample]) -> Values:
    """By kind, which is the text before the first colon: how often, and one example."""
    found: dict[str, Values] = {}
    for error in (s.error for s in samples if s.error is not None):
        entry = found.setdefault(re.sub(r":.*", "", error, flags=re.DOTALL), {"count": 0, "example": error})
        entry["count"] += 1
    return found


def over_runs(runs: Sequence[Values]) -> tuple[Values, Values]:
    """Repetitions as one: the median of every number, and [least, most] of each, by its dotted name."""
    flat = [dict(_numbers(run, "")) for run in runs]
    counts = Counter(name for run in flat for name in run)
    whole = [name for name, count in counts.items() if count == len(runs)]
    median = {name: statistics.median(run[name] for run in flat) for name in whole}
    return median, {name: [min(run[name] for run in flat), max(run[name] for run in flat)] for name in whole}


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def _steady(samples: Sequence[Sample], end: float) -> Values | None:
    begin = min((s.ended for s in samples if s.ended is not None), default=end)
    if begin >= end:
        return None
    inside = [(time, count) for s in samples for time, count in s.deliveries if begin <= time < end]
    ended = sum(1 for s in samples if s.ended is not None and begin <= s.ended < end)
    span = end - begin
    return {
        "begin": begin,
        "end": end,
        "requests": ended / span,
        "output_tokens": sum(count for _, count in inside) / span,
    }


def _meets(sample: Sample, target: Target) -> bool:
    if not sample.deliveries:
        return True
    tpot = sample.tpot or 0.0
    return (target.ttft is None or sample.ttft <= target.ttft) and (target.itl is None or tpot <= target.itl)


def _tenants(samples: Iterable[Sample]) -> list[str]:
    return sorted({sample.tenant for sample in samples} - {""})


def _spread(values: Iterable[float]) -> Spread:
    spread = Spread()
    for value in values:
        spread.add(value)
    return spread


PERCENTILES = tuple(QUANTILES)
