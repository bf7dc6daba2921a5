"""The parts of a step as FlexAttention is given them: gathered keys, and which of them each query sees.

Each row of queries sees one range of gathered keys, so causality, windows, lengths and neighbours are one comparison:

    decodes    one row of a batch each             prefills   all chunks packed into one sequence

    request 0  k k k k . .    first 0, last 3      keys     a a a a a|b b b|.
    request 1  k k k k k s    first 0, last 4      row a3   first 0, last 3
               s: a sink's place, its value zero   row b1   first 5, last 6
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnout.core import Batch, LayerSpec

Ints = npt.NDArray[np.int64]
TILE = 128  # queries or keys that are skipped or computed together


class Part(NamedTuple):
    """Requests attended to by one call of FlexAttention: B rows of L queries over S gathered keys."""

    shape: tuple[int, int, int]  # B, L, S
    rows: Tensor  # int64 [B * L], of the batch's queries; padded with its first
    num_rows: int  # without the padding
    slots: Tensor  # int64 [B * S], where the keys lie; padding points at a key of the same request
    spots: Tensor | None  # int64 [N], of the B * S gathered, those that stand for a sink
    seen: tuple[Tensor, Tensor, Tensor]  # int32 each: the first and the last key each query sees, its sink's place
    mask: Any  # BlockMask


def fixed(x: Tensor) -> Tensor:
    """Sizes of what a mask or score function captures are fixed: with open ones torch's CPU code does not compile."""
    import torch._dynamo

    torch._dynamo.mark_static(x)
    return x


def _mask_mod(seen: tuple[Tensor, Tensor, Tensor], sinks: bool) -> Callable[..., Tensor]:
    first, last, spot = seen

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = b + q  # either there is one query a row, or one row
        return (k >= first[row]) & (k <= last[row])

    def mask_or_sink(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = b + q
        return ((k >= first[row]) & (k <= last[row])) | (k == spot[row])

    return mask_or_sink if sinks else mask


def decodes_part(requests: list[int], starts: Ints, batch: Batch, layer: LayerSpec, block_size: int) -> Part:
    """One row each, padded to the longest; at least two rows, since torch.compile takes one for a special case."""
    ends = np.array([batch.kv_lens_host[b] for b in requests])
    begins = np.zeros_like(ends) if layer.window is None else np.maximum(ends - layer.window, 0)
    lens = ends - begins
    num, size = max(len(requests), 2), _padded(int(lens.max()) + layer.sinks)
    at = np.minimum(np.arange(size), np.maximum(lens - 1, 0)[:, None]) + begins[:, None]
    owners = np.repeat(np.array(requests), size)
    filled = (num - len(requests)) * size
    spots = np.arange(len(requests)) * size + lens if layer.sinks else None
    return _part(
        (num, 1, size),
        starts[requests],
        (np.pad(owners, (0, filled), mode="edge"), np.pad(at.reshape(-1), (0, filled), mode="edge")),
        (np.zeros_like(lens), lens - 1, lens if layer.sinks else np.full_like(lens, -1)),
        spots,
        batch,
        block_size,
    )


def prefills_part(requests: list[int], starts: Ints, batch: Batch, layer: LayerSpec, block_size: int) -> Part:
    """Chunks end to end, over the keys some query of each can see, end to end; each chunk's sink after its keys."""
    rows: list[Ints] = []
    owners: list[Ints] = []
    ats: list[Ints] = []
    seen: tuple[list[Ints], list[Ints], list[Ints]] = ([], [], [])
    place = 0  # among the gathered keys
    for b in requests:
        num_q, num_k = batch.query_lens_host[b], batch.kv_lens_host[b]
        last = np.arange(num_k - num_q, num_k)
        first = np.zeros(num_q, dtype=np.int64) if layer.window is None else np.maximum(last - layer.window + 1, 0)
        begin = max(min(int(first[0]), num_k - 1), 0)
        at = np.arange(begin, num_k + layer.sinks)
        rows.append(np.arange(starts[b], starts[b + 1]))
        owners.append(np.full(len(at), b))
        ats.append(np.clip(at, 0, max(num_k - 1, 0)))
        spot = place + len(at) - 1 if layer.sinks else -1
        for side, values in zip(seen, (first - begin + place, last - begin + place, np.full(num_q, spot)), strict=True):
            side.append(values)
        place += len(at)
    size, length = _padded(place), _padded(sum(map(len, rows)))
    filled = size - place
    spots = np.unique(np.concatenate(seen[2])) if layer.sinks else None
    return _part(
        (1, length, size),
        np.concatenate(rows),
        (
            np.pad(np.concatenate(owners), (0, filled), mode="edge"),
            np.pad(np.concatenate(ats), (0, filled), mode="edge"),
        ),
        (np.concatenate(seen[0]), np.concatenate(seen[1]), np.concatenate(seen[2])),
        spots,
        batch,
        block_size,
    )


def _padded(num: int) -> int:
    """A multiple of the tile, and never one tile only, which torch.compile would take for a special case."""
    return max(-(-num // TILE), 2) * TILE


def _part(
    shape: tuple[int, int, int],
    rows: Ints,
    keys: tuple[Ints, Ints],
    seen: tuple[Ints, Ints, Ints],
    spots: Ints | None,
    batch: Batch,
    block_size: int,
) -> Part:
    """rows: [N] of the batch's queries; keys: request and position of each gathered key; seen: [N] each, see Part."""
    device, table = batch.block_table.device, batch.block_table.long()
    num, length, _ = shape
    owner, at = (torch.from_numpy(x).to(device) for x in keys)
    padded = np.pad(rows, (0, num * length - len(rows)), mode="edge")
    capacity = 1 << max(num * length - 1, 1023).bit_length()  # in few sizes: each is compiled for
    held = [np.pad(x, (0, capacity - len(x)), constant_values=fill) for x, fill in zip(seen, (1, 0, -1), strict=True)]
    first, last, spot = (fixed(torch.from_numpy(x.astype(np.int32)).to(device)) for x in held)
    return Part(
        shape,
        torch.from_numpy(padded).to(device),
        len(rows),
        table[owner, at // block_size] * block_size + at % block_size,
        None if spots is None else torch.from_numpy(spots).to(device),
        (first, last, spot),
        _block_mask(shape, seen, _mask_mod((first, last, spot), spots is not None), device),
    )


def _block_mask(
    shape: tuple[int, int, int], seen: tuple[Ints, Ints, Ints], mask_mod: Callable[..., Tensor], device: torch.device
) -> Any:
    """Which tiles of keys each tile of queries needs; the others are neither read nor computed."""
    from torch.nn.attention.flex_attention import BlockMask

    num, length, size = shape
    tiles = -(-length // TILE)
    first, last, spot = seen
    row = np.arange(len(first))
    tile = row // TILE if num == 1 else row
    change = np.zeros((num * tiles, size // TILE + 1), dtype=np.int64)  # +1 where a range begins, -1 after its end
    sees, sinks = last >= first, spot >= 0
    for begin, end, of in ((first, last, sees), (spot, spot, sinks)):
        np.add.at(change, (tile[of], begin[of] // TILE), 1)
        np.add.at(change, (tile[of], end[of] // TILE + 1), -1)
    needed = change.cumsum(1)[:, :-1] > 0
    order = np.argsort(~needed, axis=1, kind="stable")
    counts, indices = (
        torch.from_numpy(x.astype(np.int32)).to(device).view(num, 1, tiles, *x.shape[1:])
        for x in (needed.sum(1), order)
    )
    return BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod, seq_lengths=(length, size), compute_q_blocks=False
    )
