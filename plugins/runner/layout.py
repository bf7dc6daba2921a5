"""A step as arrays on the host. It knows no device and no model.

Requests lie end to end, without padding:

    tokens       a0 a1 a2 a3 | b7 | c0 c1          a: first chunk, b: a decode at position 7, c: another prompt
    query_start  0             4    5       7
    kv_lens      4, 8, 2                            keys each attends to, this step's included
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnout.core import PENDING, Batch, Chunk


class HostBatch(NamedTuple):
    """B requests, T tokens; the fields of `Batch`, and what the rows of logits are for."""

    chunks: Sequence[Chunk]  # [B]
    tokens: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    block_table: NDArray[np.int32]  # [B, W]
    query_start: NDArray[np.int32]  # [B + 1]
    kv_lens: NDArray[np.int32]  # [B]
    logit_rows: NDArray[np.int64]  # [S]: of `sampled`, then of `scored`
    query_lens: tuple[int, ...]  # [B]
    sampled: list[Chunk]  # the chunks that sample
    scored: list[tuple[Chunk, int, int]]  # (chunk, first, last + 1 position) to score

    @property
    def unknown(self) -> list[tuple[int, str]]:
        """Rows whose token is PENDING, and the requests they belong to."""
        rows = np.flatnonzero(self.tokens == PENDING).tolist()
        owners = np.searchsorted(self.query_start, rows, side="right") - 1
        return [(row, self.chunks[owner].request.id) for row, owner in zip(rows, owners, strict=True)]

    def batch(self, device: torch.device) -> Batch:
        def there(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(device)

        return Batch(
            tokens=there(self.tokens),
            positions=there(self.positions),
            slots=there(self.slots),
            block_table=there(self.block_table),
            query_start=there(self.query_start),
            kv_lens=there(self.kv_lens),
            logit_rows=there(self.logit_rows),
            query_lens_host=self.query_lens,
            kv_lens_host=tuple(self.kv_lens.tolist()),
        )


def flatten(chunks: Sequence[Chunk], block_size: int) -> HostBatch:
    """The chunks end to end, in their order."""
    tokens, blocks = array("q"), array("i")
    counts, starts, widths = [], [], []
    sampled: list[Chunk] = []
    rows: list[int] = []
    scored: list[tuple[Chunk, int, int]] = []
    score_rows: list[int] = []
    for chunk in chunks:
        request, start, count, samples = chunk
        if count == 1:
            tokens.append(request.tokens[start])
        else:
            tokens.extend(request.tokens[start : start + count])
        counts.append(count)
        starts.append(start)
        blocks.extend(request.blocks)
        widths.append(len(request.blocks))
        if samples:
            sampled.append(chunk)
            rows.append(len(tokens) - 1)
        if request.sampling.prompt_logprobs is not None:
            first, end = max(start, request.num_scored), min(start + count, request.num_prompt - 1)
            if first < end:
                scored.append((chunk, first, end))
                offset = len(tokens) - count - start
                score_rows += range(first + offset, end + offset)
    count_, start_, width = (np.array(values, dtype=np.int64) for values in (counts, starts, widths))
    table = np.zeros((len(counts), int(width.max())), dtype=np.int32)
    table[np.arange(table.shape[1]) < width[:, None]] = np.frombuffer(blocks, dtype=np.int32)
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(count_, out=query_start[1:])
    owner = np.repeat(np.arange(len(counts)), count_)
    positions = np.arange(len(tokens)) - query_start[owner] + start_[owner]
    return HostBatch(
        chunks=chunks,
        tokens=np.frombuffer(tokens, dtype=np.int64),
        positions=positions,
        slots=table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        block_table=table,
        query_start=query_start,
        kv_lens=(start_ + count_).astype(np.int32),
        logit_rows=np.array(rows + score_rows, dtype=np.int64),
        query_lens=tuple(counts),
        sampled=sampled,
        scored=scored,
    )
