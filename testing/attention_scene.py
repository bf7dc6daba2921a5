"""Requests over a shuffled, poisoned cache of an attention backend. It knows how to call a backend, and no truth.

What a request holds depends on the seed and its place alone: it is the same with and without neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnout.core.interfaces import AttentionBackend
from turnout.core.types import Batch, KVSpec, LayerSpec
from turnout.testing.cache_forms import keep, restore, settled

Lens = tuple[tuple[int, int], ...]  # (queries, keys) of each request
SPARE = 3  # blocks that belong to nobody


@dataclass(frozen=True)
class Part:
    """New keys of one request in a call: those from `first` to before `end`."""

    table: Sequence[int]  # block ids
    first: int
    end: int


@dataclass(frozen=True)
class Sequenced:
    """A request: its blocks, and what is computed with. On the host, in the dtype served."""

    table: list[int]
    queries: Tensor  # [queries, heads, head_dim], of its last positions
    keys: Tensor  # [keys, kv_heads, head_dim]
    values: Tensor  # [keys, kv_heads, v_head_dim]


class Scene:
    """A cache with the requests of one case in it."""

    def __init__(
        self,
        backend: AttentionBackend[Any, Any],
        layer: LayerSpec,
        lens: Lens,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        cache_dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        self.backend, self.layer, self.size, self.device = backend, layer, block_size, torch.device(device)
        self._form = cache_dtype
        widths = [max(-(-keys // block_size), 1) for _, keys in lens]
        self.num_blocks = sum(widths) + SPARE
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        (self.cache,) = backend.allocate(KVSpec((layer,), block_size, self.num_blocks, cache_dtype), dtype, self.device)
        poison(self.cache)
        self.requests = [
            self._request([order.pop() for _ in range(width)], *pair, dtype, seed * 1000 + place)
            for place, (width, pair) in enumerate(zip(widths, lens, strict=True))
        ]
        noise = torch.randn(layer.num_heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.sinks = noise.to(dtype) if layer.sinks else None

    def _request(self, table: list[int], num_q: int, num_k: int, dtype: torch.dtype, seed: int) -> Sequenced:
        generator, layer = torch.Generator().manual_seed(seed), self.layer

        def noise(num: int, heads: int, dim: int) -> Tensor:
            return torch.randn(num, heads, dim, generator=generator, dtype=torch.float64).to(dtype)

        keys = noise(num_k, layer.num_kv_heads, layer.head_dim)
        values = noise(num_k, layer.num_kv_heads, layer.v_head_dim or layer.head_dim)
        if self._form != "auto":
            keys, values = settled(keys, self._form), settled(values, self._form)
        return Sequenced(table, noise(num_q, layer.num_heads, layer.head_dim), keys, values)

    def kept(self, x: Tensor) -> Tensor:
        """Keys or values as the cache keeps them, up to rounding."""
        return x if self._form == "auto" else restore(keep(x, self._form))

    def attend(self) -> Tensor:
        """Put all earlier keys in with one prefill, then answer every request's queries: [T, heads, v_head_dim]."""
        earlier = [(r, 0, len(r.keys) - len(r.queries)) for r in self.requests if len(r.keys) > len(r.queries)]
        if earlier:
            self.call(earlier)
        return self.call([(r, len(r.keys) - len(r.queries), len(r.keys)) for r in self.requests])

    def call(self, parts: Sequence[tuple[Sequenced, int, int]]) -> Tensor:
        """One call of the backend for (request, first new key, keys after it). Earlier positions ask with noise."""
        layer, size = self.layer, self.size
        batch = batch_of([Part(r.table, first, end) for r, first, end in parts], size, self.device)
        k, v = (
            torch.cat([getattr(r, side)[first:end] for r, first, end in parts]).to(self.device)
            for side in ("keys", "values")
        )
        q = torch.cat([self._asked(r, first, end) for r, first, end in parts]).to(self.device)
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        return self.backend.run(q, k, v, self.cache, self.backend.plan(batch, layer, size), sinks)

    def _asked(self, request: Sequenced, first: int, end: int) -> Tensor:
        known = len(request.keys) - len(request.queries)  # positions before have no query of their own
        noise = torch.randn(max(known - first, 0), *request.queries.shape[1:], generator=torch.Generator())
        return torch.cat((noise.to(request.queries.dtype), request.queries[max(first - known, 0) :]))[: end - first]


def poison(cache: Tensor | tuple[Tensor, ...]) -> None:
    """NaN wherever a float lies, and large codes, as a request that failed may leave them: one read by mistake shows."""
    for tensor in cache if isinstance(cache, tuple) else (cache,):
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x7F)  # NaN as float8_e4m3fn, 127 as int8
        else:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)


def batch_of(parts: Sequence[Part], size: int, device: torch.device, width: int = 0) -> Batch:
    """One call as tensors; the block table is at least `width` blocks wide."""
    positions = [torch.arange(part.first, part.end) for part in parts]
    slots = [torch.tensor(part.table)[p // size] * size + p % size for part, p in zip(parts, positions, strict=True)]
    counts = [part.end - part.first for part in parts]
    width = max(width, *(len(part.table) for part in parts))
    starts = torch.tensor([0, *counts]).cumsum(0)
    table = torch.tensor([[*part.table, *[0] * (width - len(part.table))] for part in parts], dtype=torch.int32)
    return Batch(
        tokens=torch.zeros(sum(counts), dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        block_table=table.to(device),
        query_start=starts.to(torch.int32).to(device),
        kv_lens=torch.tensor([part.end for part in parts], dtype=torch.int32, device=device),
        logit_rows=(starts[1:] - 1).to(device),
        query_lens_host=tuple(counts),
        kv_lens_host=tuple(part.end for part in parts),
    )
