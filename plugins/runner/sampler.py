"""Logits to token ids and log-probabilities. It knows no model, no cache and no queue, and keeps nothing between calls.

What happens to one row, in this order:

    logits               raw log-probabilities, ranks and the likeliest tokens are taken here
    repetition_penalty   logits above 0 are divided by it, others multiplied; prompt and generated tokens
    presence, frequency  subtracted; generated tokens only
    logit_bias           added
    min_tokens           stop_ids become impossible while fewer tokens exist
    structured           every token that the answer's form does not allow here becomes impossible; stop_ids are the
                         form's then, min_tokens included
    temperature          divides; what is left becomes probabilities
    top_k                the k likeliest stay
    top_p                of those, renormalised, the fewest likeliest whose probabilities reach top_p
    min_p                of those, the ones with at least min_p times the probability of the likeliest
    draw                 a number in [0, 1) finds its token on the cumulative sum, renormalised, ids ascending

Of equally likely tokens the lowest id is kept first, so exactly k stay, top_k=1 is greedy, and one token always stays.
The number drawn is a function of the request's seed and of how many tokens it has, and a row is computed from itself
alone: neighbours, their order and preemption change nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from turnout.core import Request, Sampling
from turnout.core.model import Logprobs
from turnout.core.structured import Constraint
from turnout.plugins.runner.rows import (
    CHUNK,
    Doubles,
    Floats,
    Ids,
    at_least,
    best,
    chunk_of,
    chunk_sums,
    copy,
    num_above,
    only,
    pick,
    ranked,
    unpacked,
    weigh,
)

BROKEN = -1  # stands for the token of a row that has none
NO_TOKEN = "the model produced NaN logits, or none that is finite, so no token could be chosen for this request"
IMPOSSIBLE = -9999.0  # the log-probability reported for -inf
LIKELY = 1e-3  # tokens with this share of the best one's probability nearly always suffice for top_p
TINY = 1e-37  # above 0: a weight that underflowed is never drawn
SCORED_AT_ONCE = 128  # rows; bounds the float32 copies made for a long prompt


@torch.inference_mode()
def sample(
    logits: Tensor,
    requests: Sequence[Request],
    num_done: Sequence[int] | None = None,
    constraint: Constraint | None = None,
) -> tuple[list[int], dict[int, Logprobs], dict[int, str]]:
    """One token per row; the log-probabilities of the rows that ask for them; what went wrong, by row.

    logits: any float dtype [S, vocab], one row per request, not changed. A row with an error has token 0. `num_done`:
    how many tokens each has generated, where the requests have changed since. `constraint`: which tokens may be sampled,
    for the rows that it names; it is told what was.
    """
    num_done = [request.num_generated for request in requests] if num_done is None else num_done
    asking = [row for row, request in enumerate(requests) if not request.sampling.plain]
    tokens = _greedy(logits)[0] if len(asking) < len(requests) else [BROKEN] * len(requests)
    logprobs: dict[int, Logprobs] = {}
    allowed: dict[int, Tensor] = {}
    if constraint is not None:
        bits = unpacked(constraint.fill(), logits.shape[1], logits.device)
        allowed = dict(zip(constraint.rows, bits, strict=True))
    if asking:
        fitting = {place: allowed[row] for place, row in enumerate(asking) if row in allowed}
        asked, counts = [requests[row] for row in asking], [num_done[row] for row in asking]
        chosen = _choose(copy(logits, asking), asked, counts, fitting)
        for row, token in zip(asking, chosen, strict=True):
            forced, done = requests[row].sampling.forced, num_done[row]
            tokens[row] = forced[done] if done < len(forced) and token != BROKEN else token
        marked = [row for row in asking if requests[row].sampling.logprobs is not None and tokens[row] != BROKEN]
        wanted = [requests[row].sampling.logprobs or 0 for row in marked]
        shown = {place: allowed[row] for place, row in enumerate(marked) if row in allowed and _fits(requests[row])}
        found = _logprobs(pick(logits, marked), [tokens[row] for row in marked], wanted, shown)
        logprobs = dict(zip(marked, found, strict=True))
    errors = {row: NO_TOKEN for row, token in enumerate(tokens) if token == BROKEN} if BROKEN in tokens else {}
    if errors:
        tokens = [max(token, 0) for token in tokens]
    if constraint is not None:
        constraint.take(tokens, errors)
    return tokens, logprobs, errors


def _fits(request: Request) -> bool:
    return request.sampling.fitting_tops


@torch.inference_mode()
def score(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """The log-probability of `tokens[i]` under row i of `logits` [S, vocab], and the `num_top` likeliest tokens.

    Where the model produced NaN every token has -9999.
    """
    found: list[Logprobs] = []
    for first in range(0, len(tokens), SCORED_AT_ONCE):
        part = tokens[first : first + SCORED_AT_ONCE]
        found += _logprobs(logits[first : first + len(part)], part, [num_top] * len(part))
    return found


def uniform(request: Request, num_done: int | None = None) -> float:
    """The number in [0, 1) that draws the request's next token: SplitMix64 at (seed, tokens generated so far).

    Without a seed it is another stream for each request in each process.
    """
    seed = request.sampling.seed
    if seed is None:
        seed = hash((request.id, request.arrived)) ^ _PROCESS_KEY
    done = request.num_generated if num_done is None else num_done
    state = _mix(seed + _GOLDEN) + (done + 1) * _GOLDEN
    return (_mix(state) >> 12) * 2.0**-52  # 52 bits: times any sum it stays below that sum


_PROCESS_KEY = int.from_bytes(os.urandom(8), "little")
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def _mix(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _greedy(x: Tensor) -> tuple[list[int], Tensor]:
    """The likeliest token of each row, or BROKEN, and the largest logits."""
    where, top = best(x)
    tokens: list[int] = torch.where(top.isfinite(), where, BROKEN).tolist()
    return tokens, top


def _choose(
    x: Tensor, requests: Sequence[Request], num_done: Sequence[int], fitting: Mapping[int, Tensor]
) -> list[int]:
    """One token per row of `x`, float32 [R, vocab], ours to change. BROKEN where there is none. `fitting`: the tokens that
    may be sampled, bool [vocab], of the rows that have a form."""
    _adjust(x, requests, num_done, fitting)
    tokens, top = _greedy(x)
    drawn = [row for row, token in enumerate(tokens) if token != BROKEN and not requests[row].sampling.greedy]
    if drawn:
        numbers = [uniform(requests[row], num_done[row]) for row in drawn]
        chosen = _draw(pick(x, drawn), pick(top, drawn), [requests[row].sampling for row in drawn], np.array(numbers))
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


def _adjust(x: Tensor, requests: Sequence[Request], num_done: Sequence[int], fitting: Mapping[int, Tensor]) -> None:
    """Apply penalties, bias, bans and forms in place, one scatter per kind. NaN stays NaN, under a ban too."""
    seen: list[tuple[int, Ids, Floats]] = []  # (row, ids, what their logits are divided or multiplied by)
    added: list[tuple[int, Ids, Floats]] = []  # (row, ids, what is added)
    for row, (request, done) in enumerate(zip(requests, num_done, strict=True)):
        s = request.sampling
        if s.repetition_penalty != 1.0:
            ids = np.array(request.tokens, dtype=np.int64)
            seen.append((row, ids, np.full(len(ids), s.repetition_penalty, dtype=np.float32)))
        if (s.presence_penalty or s.frequency_penalty) and done:
            ids, counts = np.unique(request.tokens[request.num_prompt :], return_counts=True)
            added.append((row, ids, (-s.presence_penalty - s.frequency_penalty * counts).astype(np.float32)))
        if s.logit_bias:
            ids = np.fromiter(s.logit_bias.keys(), dtype=np.int64)
            added.append((row, ids, np.fromiter(s.logit_bias.values(), dtype=np.float32)))
        if s.stop_ids and done < s.min_tokens and row not in fitting:
            ids = np.fromiter(s.stop_ids, dtype=np.int64)
            added.append((row, ids, np.full(len(ids), -np.inf, dtype=np.float32)))
    if seen:
        where, penalty = _scattered(seen, x.device)
        values = x[where]
        x[where] = torch.where(values > 0, values / penalty, values * penalty)
    if added:
        where, amount = _scattered(added, x.device)
        x.index_put_(where, amount, accumulate=True)
    if fitting:
        only(x, list(fitting), torch.stack(list(fitting.values())))


def _scattered(parts: list[tuple[int, Ids, Floats]], device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rows = np.repeat([row for row, _, _ in parts], [len(ids) for _, ids, _ in parts])
    ids, values = np.concatenate([ids for _, ids, _ in parts]), np.concatenate([values for _, _, values in parts])
    return (torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)), torch.from_numpy(values).to(device)


def _draw(x: Tensor, top: Tensor, samplings: Sequence[Sampling], numbers: Doubles) -> list[int]:
    """One token per row, by its number in [0, 1). `top` [R] is the finite maximum of each row of `x`."""
    weights = weigh(x, top, [s.temperature for s in samplings])
    sums = chunk_sums(weights)
    cut = [row for row, s in enumerate(samplings) if s.top_p < 1.0 or s.min_p > 0.0 or 0 < s.top_k < x.shape[1]]
    whole = [row for row in range(len(samplings)) if row not in set(cut)] if cut else list(range(len(samplings)))
    tokens = dict(zip(whole, _draw_whole(weights, sums, whole, numbers), strict=True))
    tokens.update(_draw_cut(weights, sums.sum(axis=1), cut, samplings, numbers))
    return [tokens[row] for row in range(len(samplings))]


def _draw_whole(weights: Tensor, sums: Doubles, rows: Sequence[int], numbers: Doubles) -> list[int]:
    """Draw from rows without a filter: first the chunk, then the token in it."""
    if not rows:
        return []
    edges = np.cumsum(sums[rows], axis=1)
    target = numbers[rows] * edges[:, -1]
    chunk = (edges <= target[:, None]).sum(axis=1)
    start = np.concatenate([np.zeros((len(rows), 1)), edges], axis=1)[np.arange(len(rows)), chunk]
    inside = chunk_of(pick(weights, rows), chunk)
    token = (np.cumsum(inside, axis=1) <= (target - start)[:, None]).sum(axis=1)
    last = CHUNK - 1 - (inside[:, ::-1] > 0).argmax(axis=1)  # the chunk's two sums differ in their last bits
    tokens: list[int] = (chunk * CHUNK + np.minimum(token, last)).tolist()
    return tokens


def _draw_cut(
    weights: Tensor, totals: Doubles, rows: Sequence[int], samplings: Sequence[Sampling], numbers: Doubles
) -> dict[int, int]:
    """Draw from rows with a filter. Only tokens above a floor are looked at; a floor too high is lowered once."""
    tokens: dict[int, int] = {}
    floors = _floors(weights, rows, samplings)
    while rows:
        again = []
        for row, (ids, values) in zip(rows, at_least(weights, rows, [floors[row] for row in rows]), strict=True):
            s, total = samplings[row], float(totals[row])
            # All the tokens below this floor together have less than 1 - top_p: none of them can pass.
            certain = max((1.0 - s.top_p) * total / weights.shape[1], TINY)
            if floors[row] == LIKELY > certain and values.sum(dtype=np.float64) < s.top_p * total:
                floors[row] = certain
                again.append(row)
                continue
            mass = np.cumsum(_filtered(values, total, s, weights.shape[1]))
            tokens[row] = int(ids[np.searchsorted(mass, numbers[row] * mass[-1], side="right")])
        rows = again
    return tokens


def _floors(weights: Tensor, rows: Sequence[int], samplings: Sequence[Sampling]) -> dict[int, float]:
    """A weight per row below which no token passes the filters; LIKELY, with top_p alone, is a guess."""
    floors = {row: max(samplings[row].min_p, LIKELY if samplings[row].top_p < 1.0 else TINY) for row in rows}
    few = [row for row in rows if 0 < samplings[row].top_k < weights.shape[1]]
    for row, value in zip(few, ranked(weights, few, [samplings[row].top_k for row in few]), strict=True):
        floors[row] = max(value, TINY)
    return floors


def _filtered(values: Floats, total: float, s: Sampling, vocab_size: int) -> Doubles:
    """The weights after top_k, top_p and min_p, 0 where a token is out. `total`: the weight of all tokens."""
    ordered = np.sort(values)[::-1]
    count = len(ordered)
    ranked = 0 < s.top_k < vocab_size
    if ranked:
        count = min(count, s.top_k)
    if s.top_p < 1.0:
        mass = np.cumsum(ordered[:count], dtype=np.float64)
        count = min(count, int(np.searchsorted(mass, s.top_p * (mass[-1] if ranked else total))) + 1)
    if s.min_p > 0.0:
        count = int(np.count_nonzero(ordered[:count] >= s.min_p))
    least = ordered[count - 1]
    kept = np.where(values >= least, values, 0.0).astype(np.float64)
    surplus = int(np.count_nonzero(kept)) - count
    if surplus:
        kept[np.flatnonzero(values == least)[-surplus:]] = 0.0
    return kept


def _logprobs(
    logits: Tensor, tokens: Sequence[int], num_tops: Sequence[int], fitting: Mapping[int, Tensor] = {}
) -> list[Logprobs]:
    """The raw log-probability, rank and likeliest tokens for one token per row; the likeliest only of those that `fitting`
    holds for the row, if it is there."""
    if not tokens:
        return []
    x = torch.log_softmax(logits.float(), -1)
    own = x.gather(1, torch.tensor(tokens, device=x.device)[:, None])
    if own.isnan().any():
        x.nan_to_num_(nan=IMPOSSIBLE, neginf=-torch.inf)
        own.nan_to_num_(nan=IMPOSSIBLE, neginf=-torch.inf)
    ranks = [above + 1 for above in num_above(x, own)]
    if fitting:
        only(x, list(fitting), torch.stack(list(fitting.values())))
    rows = [row for row, num_top in enumerate(num_tops) if num_top]
    counts = [num_tops[row] for row in rows]
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    for row, count, (ids, values) in zip(rows, counts, at_least(x, rows, ranked(x, rows, counts)), strict=True):
        order = np.lexsort((ids, -values))[:count]
        tops[row] = tuple(zip(ids[order].tolist(), np.maximum(values[order], IMPOSSIBLE).tolist(), strict=True))
    logprobs = own[:, 0].clamp_min(IMPOSSIBLE).tolist()
    return [Logprobs(*found) for found in zip(tokens, logprobs, ranks, tops, strict=True)]
