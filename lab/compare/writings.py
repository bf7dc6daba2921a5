"""What free writings tell: where they part, how many do beyond what is explained, how surprising the drawn tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnout.lab.compare.measures import Mark, Table
from turnout.lab.compare.sides import Item, Observed


class Divergence(NamedTuple):
    """Where two free writings part."""

    item: str
    sampled: bool
    position: int | None  # of the first different token; None: they are the same
    margin: float  # how much likelier A held its own token than B's, nats
    a: tuple[int, ...]
    b: tuple[int, ...]


def divergences(items: Sequence[Item], a: Observed, b: Observed) -> list[Divergence]:
    """Greedy writings, then sampled ones. One that ends where the other goes on parts there, as at a tie: servers differ
    in whether they can write past an end token."""
    found = []
    for sampled, mine, theirs in ((False, a.greedy, b.greedy), (True, a.sampled, b.sampled)):
        for item in items if theirs else ():
            x, y = mine[item.id], theirs[item.id]
            length = max(len(x.tokens), len(y.tokens))
            at = next((i for i in range(length) if x.tokens[i : i + 1] != y.tokens[i : i + 1]), None)
            margin = 0.0
            if at is not None and at < len(x.tokens) and at < len(y.tokens):
                top = dict(x.marks[at].top)
                margin = x.marks[at].logprob - top.get(y.tokens[at], x.marks[at].top[-1][1])
            found.append(Divergence(item.id, sampled, at, margin, x.tokens, y.tokens))
    return found


def counts(found: Sequence[Divergence], near_tie: float, sampled: bool) -> NDArray[np.float64]:
    """1 for each item whose writings part: greedy ones only where it is no near tie."""
    mine = [d for d in found if d.sampled is sampled]
    return np.array([d.position is not None and (sampled or d.margin >= near_tie) for d in mine], dtype=np.float64)


def explained(table: Table, num_items: int, num_top: int, max_tokens: int) -> NDArray[np.float64]:
    """Per item, how likely it may be that one seed draws differently from the two sides' distributions."""
    decoded = table.where(table.decoded)
    distance = np.sqrt(np.maximum(decoded.kl, 0.0) / 2)
    mean = np.zeros(num_items)
    mean[np.unique(decoded.cluster)] = decoded.per_cluster(distance)
    return np.minimum(mean * num_top * max_tokens, 1.0)


def surprise(items: Sequence[Item], observed: Observed, temperature: float) -> NDArray[np.float64]:
    """Per item, by how many nats the drawn tokens are less likely than draws at that temperature are in the mean."""
    found = []
    for item in items:
        marks = observed.sampled[item.id].marks
        found.append(float(np.mean([_expected(mark, temperature) - mark.logprob for mark in marks])))
    return np.array(found)


def _expected(mark: Mark, temperature: float) -> float:
    """The mean log-probability of a token drawn from those listed."""
    logprobs = np.array([logprob for _, logprob in mark.top])
    weights = np.exp((logprobs - logprobs[0]) / temperature)
    return float((weights * np.where(weights > 0, logprobs, 0.0)).sum() / weights.sum())
