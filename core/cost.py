"""What a step costs, learned from finished ones. It knows counts and seconds, no request and no device.

    seconds = w · (1, prefill tokens, keys they attend to, decodes, keys they read, blocks moved),   w >= 0

Recursive least squares on relative errors, older steps forgotten bit by bit (Haykin, Adaptive Filter Theory, ch. 10). A
weak prior, slower than most machines, stands in until steps were seen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

PRIOR = np.array([5e-3, 5e-4, 1e-7, 1e-3, 1e-7, 1e-3])  # seconds each
FORGET = 0.995  # weight a step keeps when the next one is seen
TRUST = 1e-3  # of the prior, in steps
HANGS = 20.0  # times its expected seconds that a step may take
RECENT = 1 / 64  # weight of the last step in how far steps exceed their estimate


class Load(NamedTuple):
    """What a step computes."""

    prefill_tokens: int = 0  # of chunks with more than one token
    prefill_keys: int = 0  # summed over those tokens
    decodes: int = 0  # chunks of one token
    decode_keys: int = 0
    moved_blocks: int = 0  # between cache and host memory


class StepCost(NamedTuple):
    """An estimate; it does not change."""

    weights: tuple[float, ...]  # seconds for each feature, in the order of the formula
    num_seen: int  # steps it was learned from
    excess: float = 0.0  # mean square of seconds / estimate - 1 of steps made to fit a time, where they took longer

    def seconds(self, load: Load) -> float:
        """The expected time of a step."""
        weights = self.weights
        return weights[0] + sum(w * x for w, x in zip(weights[1:], load, strict=True))

    def recompute(self, num_tokens: int) -> float:
        """Seconds that computing a prompt of `num_tokens` from nothing adds to the steps it is part of."""
        _, token, key, *_ = self.weights
        return token * num_tokens + key * num_tokens * (num_tokens + 1) / 2

    def swap(self, num_blocks: int) -> float:
        """Seconds to move that many blocks out and back in."""
        return 2 * num_blocks * self.weights[5]

    def fits(self, load: Load, start: int, seconds: float) -> int:
        """How many tokens from position `start` can join `load` before the step is expected to exceed `seconds`, less
        what nearly all steps like it have taken beyond their estimate lately."""
        _, token, key, *_ = self.weights
        left = seconds / (1.0 + 4.0 * math.sqrt(self.excess)) - self.seconds(load)
        linear = token + key * (start + 0.5)
        if left <= 0.0:
            return 0
        if key <= 0.0:
            return int(min(left / linear, 2**31)) if linear > 0.0 else 2**31
        return int((math.sqrt(linear * linear + 2 * key * left) - linear) / key)

    def bound(self, load: Load) -> float:
        """Seconds after which a step must be taken to hang: many times what is expected, and what its tokens would take
        in a step each, for kinds of work that were never seen."""
        return max(HANGS * self.seconds(load), (load.prefill_tokens + load.decodes) * self.seconds(Load(decodes=1)))


class CostModel:
    """Learns the estimate. The same steps in the same order give the same estimates."""

    def __init__(self) -> None:
        self._a, self._b = np.zeros((len(PRIOR), len(PRIOR))), np.zeros(len(PRIOR))
        self._num_seen, self._excess = 0, 0.0
        self._estimate: StepCost | None = None

    @property
    def estimate(self) -> StepCost:
        """What is expected now; worked out when it is asked for."""
        if self._estimate is None:
            prior = np.diag(TRUST / PRIOR**2) * PRIOR.sum() ** 2  # never forgotten: some kinds of work come late
            weights = _nonnegative(self._a + prior, self._b + prior @ PRIOR)
            self._estimate = StepCost(weights, self._num_seen, self._excess)
        return self._estimate

    def observe(self, load: Load, seconds: float, fitted: bool = False) -> None:
        """A step with this load took so long; `fitted`: it was made to fit a time, by `StepCost.fits`."""
        if seconds <= 0.0 or not math.isfinite(seconds):
            return
        if fitted:
            expected = self.estimate.seconds(load)
            over = max(seconds / expected - 1.0, 0.0) if 2.0 * expected > seconds else 1.0
            self._excess += RECENT * (over * over - self._excess)
        x = np.array((1.0, *load)) / seconds
        self._a *= FORGET
        self._a += x[:, None] * x
        self._b *= FORGET
        self._b += x
        self._num_seen += 1
        self._estimate = None


def _nonnegative(a: np.ndarray, b: np.ndarray) -> tuple[float, ...]:
    """A w >= 0 with small w·a·w / 2 - b·w: solve, drop what came out negative, solve again. What was dropped stays at 0,
    so it is not always the least (that is Lawson and Hanson's NNLS, whose loop costs more than a small step)."""
    active = list(range(len(b)))
    while active:
        found = np.linalg.lstsq(a[np.ix_(active, active)], b[active], rcond=None)[0]
        if (found >= 0).all():
            break
        active = [i for i, value in zip(active, found, strict=True) if value > 0]
    weights = [0.0] * len(b)
    for i, value in zip(active, found if active else (), strict=True):
        weights[i] = float(value)
    return tuple(weights)
