"""The passes over whole rows of logits that sampling needs. It knows no request.

On the CPU they are NumPy's: its argmax is ten times as fast as torch's, finding a row's few large entries five times,
and no thread waits for another on a busy machine. Elsewhere they are torch's, for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

CHUNK = 128  # entries summed together


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def copy(x: Tensor, rows: Sequence[int]) -> Tensor:
    """The given rows as float32, the caller's to change."""
    if _on_host(x) and x.dtype == torch.float32:
        return torch.from_numpy(x.numpy(force=True)[list(rows)])
    return x[rows].float()


def pick(x: Tensor, rows: Sequence[int]) -> Tensor:
    """The given rows, ascending; `x` itself, not a copy, when these are all."""
    return x if len(rows) == len(x) else x[rows]


def best(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of each row: where (int64 [R], the first of equals) and how large (float32 [R])."""
    where = torch.from_numpy(x.float().numpy(force=True).argmax(axis=1)) if _on_host(x) else x.argmax(-1)
    return where, x.gather(1, where[:, None])[:, 0].float()


def weigh(x: Tensor, top: Tensor, heat: Sequence[float]) -> Tensor:
    """exp((x - top) / heat) in place, `top` float32 [R] being each row's largest entry: that one becomes 1."""
    divisor = torch.tensor(heat, dtype=torch.float32, device=x.device)[:, None]
    if not _on_host(x):
        return x.sub_(top[:, None]).div_(divisor).exp_()
    host = x.numpy(force=True)
    host -= top.numpy(force=True)[:, None]
    with np.errstate(over="ignore"):  # a logit near the lowest float becomes -inf, as it should
        host /= divisor.numpy()
    np.exp(host, out=host)
    return x


def ranked(x: Tensor, rows: Sequence[int], ranks: Sequence[int]) -> list[float]:
    """The value of each row's `rank`-largest entry; rank 1 is the largest."""
    if not rows:
        return []
    if _on_host(x):
        host, size = x.numpy(force=True), x.shape[1]
        return [float(np.partition(host[row], size - rank)[size - rank]) for row, rank in zip(rows, ranks, strict=True)]
    order = torch.tensor(ranks, device=x.device)[:, None] - 1
    found: list[float] = pick(x, rows).topk(max(ranks)).values.gather(1, order)[:, 0].tolist()
    return found


def at_least(x: Tensor, rows: Sequence[int], floors: Sequence[float]) -> list[tuple[Ids, Floats]]:
    """Per row the entries not below its floor: where, ascending, and how large."""
    if not rows:
        return []
    if _on_host(x):
        host = x.numpy(force=True)
        where = [np.flatnonzero(host[row] >= np.float32(floor)) for row, floor in zip(rows, floors, strict=True)]
        return [(ids, host[row][ids]) for row, ids in zip(rows, where, strict=True)]
    x = pick(x, rows)
    row, column = (x >= torch.tensor(floors, dtype=x.dtype, device=x.device)[:, None]).nonzero(as_tuple=True)
    values, owner, ids = x[row, column].cpu().numpy(), row.cpu().numpy(), column.cpu().numpy()
    edges = np.searchsorted(owner, np.arange(1, len(rows)))
    return list(zip(np.split(ids, edges), np.split(values, edges), strict=True))


def num_above(x: Tensor, values: Tensor) -> list[int]:
    """How many entries of each row are larger than the row's value; `values` [R, 1]."""
    if _on_host(x):
        pairs = zip(x.numpy(force=True), values.numpy(force=True), strict=True)
        return [int(np.count_nonzero(row > value)) for row, value in pairs]
    found: list[int] = (x > values).sum(-1).tolist()
    return found


def chunk_sums(x: Tensor) -> Doubles:
    """[R, chunks]: the sums of CHUNK neighbours. Of fixed size, since torch adds a single row in another order than
    one of several, and a sum must not depend on the neighbours."""
    missing = -x.shape[1] % CHUNK
    chunks = (nn.functional.pad(x, (0, missing)) if missing else x).view(len(x), -1, CHUNK)
    sums: Floats = chunks.numpy(force=True).sum(-1) if _on_host(x) else chunks.sum(-1).cpu().numpy()
    return sums.astype(np.float64)


def chunk_of(x: Tensor, chunks: Ids) -> Doubles:
    """[R, CHUNK]: the entries of one chunk per row, 0 beyond the end."""
    where = torch.from_numpy(chunks[:, None] * CHUNK + np.arange(CHUNK)).to(x.device)
    entries = x.gather(1, where.clamp_max(x.shape[1] - 1)).masked_fill_(where >= x.shape[1], 0.0)
    return entries.double().cpu().numpy()


def unpacked(bits: Tensor, size: int, device: torch.device) -> Tensor:
    """bool [R, size] on `device` of int32 [R, ceil(size / 32)] on the host, the lowest bit first."""
    if device.type == "cpu":
        found = np.unpackbits(bits.numpy().view(np.uint8), axis=1, count=size, bitorder="little")
        return torch.from_numpy(found.view(np.bool_))
    places = torch.arange(32, dtype=torch.int32, device=device)
    return (bits.to(device)[:, :, None] >> places & 1).bool().flatten(1)[:, :size]


def only(x: Tensor, rows: Sequence[int], allowed: Tensor) -> None:
    """Make every other entry of these rows -inf, in place; `allowed` bool, a row for each."""
    if _on_host(x):
        host, hidden = x.numpy(force=True), ~allowed.numpy()
        for row, gone in zip(rows, hidden, strict=True):
            host[row][gone] = -np.inf
        return
    x[rows] = pick(x, rows).masked_fill(~allowed, -torch.inf)
