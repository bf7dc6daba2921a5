"""Attention over paged keys, one request at a time, in float32: what every emulated library computes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Window = tuple[int | None, int | None]  # keys before and after a query that it sees; None or below 0: any number


def gathered(cache: Tensor, pages: Tensor, num: int) -> Tensor:
    """The first `num` keys or values of the pages: [num, ...] from [num_pages, page_size, ...].

    Raises IndexError where a page outside the cache, or more keys than the pages hold, are asked for."""
    size = cache.shape[1]
    if num > len(pages) * size:
        raise IndexError(f"{num} keys do not lie in {len(pages)} pages of {size}")
    used = pages[: -(-num // size)].long()
    if len(used) and not (0 <= int(used.min()) and int(used.max()) < len(cache)):
        raise IndexError(f"pages {used.tolist()} of a cache of {len(cache)}")
    return cache[used].flatten(0, 1)[:num]


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Window = (None, None), softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """q: [n, heads, dim]; k, v: [m, kv_heads, dim]; out [n, heads, v_dim] and the natural log of each softmax's sum
    [n, heads], both float32; -inf and zeros where a query sees nothing. The last query stands at the last key."""
    left, right = (None if side is None or side < 0 else side for side in window)
    if causal:
        right = 0
    group = q.shape[1] // k.shape[1]
    k, v = (side.float().repeat_interleave(group, 1) for side in (k, v))
    logits = torch.einsum("nhd,mhd->nhm", q.float(), k) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    keys = torch.arange(len(k))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if left is not None:
        seen &= keys >= at - left
    if right is not None:
        seen &= keys <= at + right
    logits = logits.masked_fill(~seen[:, None], -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse[..., None].nan_to_num(neginf=0.0))
    return torch.einsum("nhm,mhd->nhd", weights, v), lse
