"""Equivalent, different, or not enough data: a judgement over prompts, with its error rates stated.

Tokens of one prompt depend on each other, so the unit is the prompt: each measure is averaged over a prompt's tokens. The
noise of A against itself is taken off, prompt by prompt. For each measure and context bucket, with the effect d that
matters and n prompts:

    different    the lower confidence bound of the mean excess is above d (Student's t; of KL, which is never negative,
                 also k-th largest value times the share of prompts above it, an exact bound that no spread blurs), or
                 more prompts than chance explains are above d (exact sign test); error rate alpha shared among all
                 tests made (Bonferroni). And: one prompt's KL over all its tokens is 100 d and a million times what A's
                 own noise is anywhere: that no repetition explains, however few the prompts
    equivalent   the upper confidence bound is below d in every one (two one-sided tests, Schuirmann 1987); of n writings
                 of which none parts, it is 1 - alpha^(1/n), not 0: they have no spread to judge by
    otherwise    not enough data; how many prompts would do is computed for the stated power

One measure that is different makes the verdict different.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_PROMPTS = 5  # fewer say nothing about spread
FAR = 100.0  # effects; so far apart is one prompt different, where
BEYOND_NOISE = 1e6  # times A's own noise, which counts as at least
LEAST_NOISE = 1e-12  # nats: what rounding leaves
ONE = "one prompt"  # the bucket of that finding
NEVER_NEGATIVE = frozenset({"kl"})
SHARES = frozenset({"greedy", "sampled"})  # measures that are 0 or 1 in each prompt


class Verdict(Enum):
    """The value is the exit code of `turnout ab`."""

    EQUIVALENT = 0
    DIFFERENT = 1
    NOT_ENOUGH_DATA = 2


@dataclass(frozen=True)
class Judging:
    """How sure to be. Raises ValueError naming the option."""

    alpha: float = 0.01  # chance of "different" where the excess is at most the effect
    power: float = 0.9  # chance to settle the question with the number of prompts that is asked for

    def __post_init__(self) -> None:
        for name in ("alpha", "power"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"judge.{name} must be between 0 and 1, got {getattr(self, name)}")


class Finding(NamedTuple):
    """One measure in one bucket."""

    measure: str
    bucket: str
    num_prompts: int
    mean: float  # excess over the noise floor
    low: float
    high: float
    effect: float
    verdict: Verdict
    needed: int | None  # prompts that would settle it; None: settled


def judge(
    excess: Mapping[tuple[str, str], NDArray[np.float64]], effects: Mapping[str, float], judging: Judging
) -> tuple[Verdict, list[Finding]]:
    """`excess`: (measure, bucket) -> one value per prompt, A against B less A against A."""
    alpha = judging.alpha / max(3 * len(excess), 1)  # three tests each
    findings = [_finding(key, values, effects[key[0]], alpha, judging) for key, values in excess.items()]
    verdicts = {finding.verdict for finding in findings}
    for verdict in (Verdict.DIFFERENT, Verdict.NOT_ENOUGH_DATA):
        if verdict in verdicts:
            return verdict, findings
    return (Verdict.EQUIVALENT if findings else Verdict.NOT_ENOUGH_DATA), findings


def far_apart(excess: NDArray[np.float64], noise: NDArray[np.float64], effect: float) -> Finding | None:
    """The finding that some prompts are beyond all noise; None: none is. Both in nats a token, a value per prompt."""
    floor = max(float(noise.max(initial=0.0)), LEAST_NOISE)
    beyond = excess[excess >= max(FAR * effect, BEYOND_NOISE * floor)]
    if not len(beyond):
        return None
    least, most = float(beyond.min()), float(beyond.max())
    return Finding("kl", ONE, len(beyond), most, least, most, effect, Verdict.DIFFERENT, None)


def _bound_by_order(values: NDArray[np.float64], alpha: float) -> float:
    """A lower confidence bound of the mean of what is never negative, whatever its spread.

    The share of all prompts above the k-th largest of n has the distribution Beta(k, n - k + 1), and the mean is at least
    that share times the value (Markov). k is 1, 2, 4, …, which share alpha. What the noise taken off left below 0 counts.
    """
    from scipy import stats

    num = len(values)
    counts = [2**power for power in range(num.bit_length()) if 2**power <= num]
    largest = np.sort(values)[::-1]
    least = min(float(largest[-1]), 0.0)
    return least + max(float(largest[k - 1] * stats.beta.ppf(alpha / len(counts), k, num - k + 1)) for k in counts)


def _finding(
    key: tuple[str, str], values: NDArray[np.float64], effect: float, alpha: float, judging: Judging
) -> Finding:
    from scipy import stats

    num, mean = len(values), float(values.mean())
    if num < 2:
        return Finding(*key, num, mean, -math.inf, math.inf, effect, Verdict.NOT_ENOUGH_DATA, MIN_PROMPTS)
    spread = float(values.std(ddof=1))
    error = spread / math.sqrt(num)
    low = mean - float(stats.t.ppf(1 - alpha, num - 1)) * error
    if key[0] in NEVER_NEGATIVE:
        low = max(low, _bound_by_order(values, alpha))
    high = mean + float(stats.t.ppf(1 - judging.alpha, num - 1)) * error
    if key[0] in SHARES:
        high = max(high, 1 - judging.alpha ** (1 / num))
    above = int((values > effect).sum())
    by_sign = float(stats.binom.sf(above - 1, num, 0.5))
    if num >= MIN_PROMPTS and (low > effect or by_sign < alpha):
        return Finding(*key, num, mean, low, high, effect, Verdict.DIFFERENT, None)
    if num >= MIN_PROMPTS and high < effect:
        return Finding(*key, num, mean, low, high, effect, Verdict.EQUIVALENT, None)
    reach = float(stats.norm.ppf(1 - alpha) + stats.norm.ppf(judging.power))
    distance = max(abs(mean - effect), 0.1 * effect, 1e-300)
    needed = max(MIN_PROMPTS, num + 1, math.ceil((reach * spread / distance) ** 2))
    if key[0] in SHARES and effect < 1:
        needed = max(needed, math.floor(math.log(judging.alpha) / math.log1p(-effect)) + 1)
    return Finding(*key, num, mean, low, high, effect, Verdict.NOT_ENOUGH_DATA, needed)
