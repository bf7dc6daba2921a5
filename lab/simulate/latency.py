"""How long a step takes: a constant, or a law fitted to the steps of a live run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from turnout.lab.workload import recorded
from turnout.lab.workload.work import Work

HELD_OUT = 5  # every fifth step judges the fit and has no part in it
FEATURES = (
    "a step",
    "a prefill token",
    "a (token, key) pair of prefill",
    "a decode",
    "a key read by decodes",
    "a token sampled",
    "a block moved",
)


@dataclass
class Constant:
    """Every step takes as long: for tests, and for counting steps."""

    per_step: float = 0.02  # seconds

    def __post_init__(self) -> None:
        if self.per_step <= 0:
            raise ValueError(f"latency.per_step must be above 0, got {self.per_step}")

    def start(self, block_size: int) -> None: ...

    def seconds(self, work: Work) -> float:
        return self.per_step

    def assumptions(self) -> list[str]:
        return [f"every step takes {self.per_step} s"]


class Fit(NamedTuple):
    """A law of step times, and how far off it is on steps it has not seen."""

    weights: list[float]  # seconds, in the order of FEATURES
    num_steps: int
    median_error: float  # relative
    p90_error: float


@dataclass
class Fitted:
    """seconds = w · (1, prefill tokens, prefill pairs, decodes, decode keys, samples, moved blocks), w >= 0, by least
    squares on relative errors over four fifths of a log's steps. The other fifth says how good it is."""

    log: str = ""  # a file that record=FILE wrote

    def start(self, block_size: int) -> None:
        if not self.log:
            raise ValueError("latency.log is empty: it names the file of a live run that was started with record=FILE")
        works, seconds = recorded.steps(self.log)
        self._fit = fit(np.array([features(work) for work in works]), seconds)
        self._weights = tuple(self._fit.weights)

    @property
    def found(self) -> Fit:
        """Once started."""
        return self._fit

    def seconds(self, work: Work) -> float:
        step, token, pair, decode, key, sample, block = self._weights
        return (
            step
            + token * work.prefill_tokens
            + pair * work.prefill_pairs
            + decode * work.decodes
            + key * work.decode_keys
            + sample * work.samples
            + block * work.moved_blocks
        )

    def assumptions(self) -> list[str]:
        found = self._fit
        law = ", ".join(f"{w:.3g} s for {name}" for w, name in zip(found.weights, FEATURES, strict=True) if w)
        judged = (
            f"fitted to {found.num_steps} steps of {self.log}; on every {HELD_OUT}th step, held out, the error is "
            f"{found.median_error:.1%} in the median, {found.p90_error:.1%} at p90"
        )
        return [
            f"steps take {law}",
            judged,
            "a load unlike the logged one (longer contexts, larger batches) is extrapolated",
        ]


def features(work: Work) -> tuple[float, ...]:
    return (
        1.0,
        work.prefill_tokens,
        work.prefill_pairs,
        work.decodes,
        work.decode_keys,
        work.samples,
        work.moved_blocks,
    )


def fit(rows: np.ndarray, seconds: np.ndarray) -> Fit:
    """rows: [N, features]; seconds: [N]."""
    held = np.arange(len(rows)) % HELD_OUT == HELD_OUT - 1
    weights = nonnegative(rows[~held] / seconds[~held, None], np.ones(int((~held).sum())))
    errors = np.abs(rows[held] @ weights / seconds[held] - 1.0)
    return Fit([float(w) for w in weights], len(rows), float(np.median(errors)), float(np.quantile(errors, 0.9)))


def nonnegative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The w >= 0 that minimises |a w - b|², with columns brought to one size: seconds and pairs differ by ten powers of ten."""
    from scipy.optimize import nnls

    size = np.where((largest := np.abs(a).max(axis=0)) > 0, largest, 1.0)
    weights: np.ndarray = nnls(a / size, b)[0] / size
    return weights
