"""How far apart two engines are on one token, and a table of such differences. It knows no engine and no statistics.

Both sides say, for the same forced token after the same tokens, its log-probability and the likeliest tokens with theirs.

    flip      the two likeliest tokens differ; its margin is how much likelier A holds its own than B's, in nats
    near tie  a flip whose margin is below a stated bound: either answer was as good
    kl        KL(A || B) in nats over the tokens both list, all others together as one: a lower bound of the full one
    gap       |log-probability of the forced token, A - B|
    overlap   share of A's listed tokens that B lists too
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BUCKETS = (0, 64, 256, 1024, 4096, 16384)  # lower ends of context lengths, in tokens
TINY = 1e-12  # a probability below it is rounding
REST = 1e-6  # what the listed tokens leave of 1 is as inexact as float32 makes their sum


class Mark(NamedTuple):
    """What one engine said of one token."""

    token: int | str  # an id, or the text where a server gives no ids
    logprob: float
    top: tuple[tuple[int | str, float], ...]  # the likeliest tokens, best first


class Difference(NamedTuple):
    """Two marks of one token."""

    flip: bool
    margin: float  # nats; 0 without a flip
    kl: float
    gap: float
    overlap: float


def difference(a: Mark, b: Mark) -> Difference:
    """Raises ValueError when the two are not about the same token, or a side lists none or says what is no number."""
    if a.token != b.token:
        raise ValueError(f"the sides scored different tokens, {a.token!r} and {b.token!r}: their tokenizers differ")
    if not a.top or not b.top:
        raise ValueError("a side lists no likeliest tokens: the comparison needs at least one")
    mine, theirs = dict(a.top), dict(b.top)
    if any(math.isnan(value) for value in (a.logprob, b.logprob, *mine.values(), *theirs.values())):
        raise ValueError(f"a log-probability of token {a.token!r} is not a number")
    best, other = a.top[0][0], b.top[0][0]
    flip = best != other
    margin = a.top[0][1] - mine.get(other, a.top[-1][1]) if flip else 0.0
    gap = 0.0 if a.logprob == b.logprob else abs(a.logprob - b.logprob)  # both may be minus infinity
    return Difference(flip, margin, _kl(mine, theirs), gap, len(mine.keys() & theirs) / len(mine))


def _kl(mine: dict[int | str, float], theirs: dict[int | str, float]) -> float:
    common = mine.keys() & theirs
    p = [math.exp(mine[token]) for token in common]
    q = [math.exp(theirs[token]) for token in common]
    p.append(max(1.0 - sum(p), REST))  # raising both to a floor never makes the divergence larger
    q.append(max(1.0 - sum(q), REST))
    # p log(p/q) - p + q is never negative, so rounding can't make the sum so
    return sum(x * math.log(x / max(y, TINY)) - x + y if x > TINY else y for x, y in zip(p, q, strict=True))


@dataclass(frozen=True)
class Table:
    """Differences of many tokens, a row each."""

    cluster: NDArray[np.int64]  # which prompt; tokens of one prompt are not independent
    context: NDArray[np.int64]  # tokens before this one
    decoded: NDArray[np.bool_]  # scored in a decode, not in a prefill
    flip: NDArray[np.bool_]
    margin: NDArray[np.float64]
    kl: NDArray[np.float64]
    gap: NDArray[np.float64]
    overlap: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, bool, Difference]]) -> Table:
        """Rows of (cluster, context, decoded, difference)."""
        listed = [(cluster, context, decoded, *found) for cluster, context, decoded, found in rows]
        columns = list(zip(*listed, strict=True)) if listed else [()] * 8
        kinds = (np.int64, np.int64, np.bool_, np.bool_, np.float64, np.float64, np.float64, np.float64)
        return cls(*(np.array(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)))

    def __len__(self) -> int:
        return len(self.cluster)

    def where(self, mask: NDArray[np.bool_]) -> Table:
        """The rows for which the mask holds."""
        return Table(*(getattr(self, name)[mask] for name in self.__dataclass_fields__))

    def buckets(self, edges: Sequence[int] = BUCKETS, least: int = 1) -> dict[str, Table]:
        """By context length: only buckets that hold rows, named like "64-255". The longest are joined with those before
        them until `least` prompts reach them: few say nothing, and a long prompt has short contexts too."""
        ends = zip(edges, (*edges[1:], None), strict=True)
        parts = [(low, high, self._between(low, high)) for low, high in ends]
        parts = [part for part in parts if len(part[2])]
        while len(parts) > 1 and len(np.unique(parts[-1][2].cluster)) < least:
            (low, _, _), (_, high, _) = parts[-2:]
            parts[-2:] = [(low, high, self._between(low, high))]
        return {_span(low, high): part for low, high, part in parts}

    def _between(self, low: int, high: int | None) -> Table:
        return self.where((self.context >= low) & (self.context < (high or np.inf)))

    def per_cluster(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of `values` in each cluster that has rows, ascending."""
        _, where = np.unique(self.cluster, return_inverse=True)
        return np.bincount(where, values) / np.bincount(where)


def _span(low: int, high: int | None) -> str:
    return f"{low}+" if high is None else f"{low}" if high == low + 1 else f"{low}-{high - 1}"


class Summary(NamedTuple):
    """A table in a few numbers."""

    num_tokens: int
    num_prompts: int
    flip_rate: float
    real_flip_rate: float  # without near ties
    kl_mean: float
    kl_p99: float
    kl_max: float
    gap_mean: float
    overlap: float


def summarize(table: Table, near_tie: float) -> Summary:
    """`near_tie`: flips with a smaller margin, in nats, are benign."""
    if not len(table):
        return Summary(0, 0, *[math.nan] * 7)
    real = table.flip & (table.margin >= near_tie)
    return Summary(
        len(table),
        len(np.unique(table.cluster)),
        float(table.flip.mean()),
        float(real.mean()),
        float(table.kl.mean()),
        float(np.quantile(table.kl, 0.99)),
        float(table.kl.max()),
        float(table.gap.mean()),
        float(table.overlap.mean()),
    )
