"""Requests over a shuffled, poisoned cache of an attention backend. It knows how to call a backend, and no truth.

    cache   | nobody's, never touched (`beneath`) ... | p p p 2a 1b p 2c 1a p 2b p |     1a: request 1, its first block
                                                        p: poison, as is the rest of a part-full block

What a request holds depends on the seed and its place alone: it is the same whoever else is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.core.interfaces import AttentionBackend
from turnout.core.types import Batch, KVSpec, LayerSpec
from turnout.testing.cache_forms import keep, restore, settled

Lens = tuple[tuple[int, int], ...]  # (queries, keys) of each request
SPARE = 3  # blocks among those of the requests that belong to nobody


@dataclass(frozen=True)
class AttentionCase:
    """One call: requests with `lens`, their earlier keys already in the cache."""

    name: str
    layer: LayerSpec
    lens: Lens  # (queries, keys) of each request
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    cache_dtype: str = "auto"


@dataclass
class Sequenced:
    """A request: its blocks, and what is computed with, on the host and in the dtype served."""

    table: list[int]  # block ids
    queries: Tensor  # [queries, heads, head_dim], of its last positions
    keys: Tensor  # [keys, kv_heads, head_dim]
    values: Tensor  # [keys, kv_heads, v_head_dim]


class Part(NamedTuple):
    """New keys of one request in a call: those from `first` to before `end`."""

    request: Sequenced
    first: int
    end: int


class Scene:
    """The requests of a case, and a cache for them."""

    def __init__(
        self, backend: AttentionBackend[Any, Any], case: AttentionCase, seed: int = 0, beneath: int = 0
    ) -> None:
        layer, size = case.layer, case.block_size
        self.backend, self.case, self.layer, self.device = backend, case, layer, torch.device(case.device)
        widths = [max(-(-keys // size), 1) for _, keys in case.lens]
        self.num_blocks = beneath + sum(widths) + SPARE
        order = beneath + torch.randperm(sum(widths) + SPARE, generator=_seeded(seed))
        spec = KVSpec((layer,), size, self.num_blocks, case.cache_dtype)
        (self.cache,) = backend.allocate(spec, case.dtype, self.device)
        for tensor in tensors_of(self.cache):
            poison(tensor[beneath:])
        tables = torch.split(order[: sum(widths)], widths)
        self.spare: list[int] = order[sum(widths) :].tolist()
        self.requests = [
            self._request(table.tolist(), *pair, _seeded(seed * 1000 + place))
            for place, (table, pair) in enumerate(zip(tables, case.lens, strict=True))
        ]
        noise = torch.randn(layer.num_heads, generator=_seeded(seed), dtype=torch.float64).to(case.dtype)
        self.sinks = noise.to(self.device) if layer.sinks else None

    def _request(self, table: list[int], num_q: int, num_k: int, generator: torch.Generator) -> Sequenced:
        layer, form = self.layer, self.case.cache_dtype

        def noise(num: int, heads: int, dim: int) -> Tensor:
            return torch.randn(num, heads, dim, generator=generator, dtype=torch.float64).to(self.case.dtype)

        keys = noise(num_k, layer.num_kv_heads, layer.head_dim)
        values = noise(num_k, layer.num_kv_heads, layer.v_head_dim or layer.head_dim)
        if form != "auto":
            keys, values = settled(keys, form), settled(values, form)
        return Sequenced(table, noise(num_q, layer.num_heads, layer.head_dim), keys, values)

    def kept(self, x: Tensor) -> Tensor:
        """Keys or values as the cache keeps them, up to rounding."""
        return x if self.case.cache_dtype == "auto" else restore(keep(x, self.case.cache_dtype))

    @property
    def last(self) -> list[Part]:
        """The call that answers every request's queries."""
        return [Part(r, len(r.keys) - len(r.queries), len(r.keys)) for r in self.requests]

    def store_earlier(self) -> None:
        """Put all earlier keys in by the backend's own path: one prefill."""
        if earlier := [Part(r, 0, first) for r, first, _ in self.last if first > 0]:
            self.call(earlier)

    def attend(self) -> Tensor:
        """Store all earlier keys, then answer every request's queries: [T, heads, v_head_dim]."""
        self.store_earlier()
        return self.call(self.last)

    def call(self, parts: Sequence[Part]) -> Tensor:
        """One call of the backend; positions that have no query of their own ask with noise. [T, heads, v_head_dim]"""
        return self.run(batch_of(parts, self.case.block_size, self.device), parts)

    def run(self, batch: Batch, parts: Sequence[Part]) -> Tensor:
        plan = self.backend.plan(batch, self.layer, self.case.block_size)
        return self.backend.run(*self.inputs(parts), self.cache, plan, self.sinks)

    def inputs(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor, Tensor]:
        """q: [T, heads, head_dim]; k, v: [T, kv_heads, dim]."""
        q = [_asked(part) for part in parts]
        k, v = [r.keys[a:b] for r, a, b in parts], [r.values[a:b] for r, a, b in parts]
        return torch.cat(q).to(self.device), torch.cat(k).to(self.device), torch.cat(v).to(self.device)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _asked(part: Part) -> Tensor:
    request, first, end = part
    known = len(request.keys) - len(request.queries)
    noise = torch.randn(max(known - first, 0), *request.queries.shape[1:], generator=_seeded(first))
    return torch.cat((noise.to(request.queries.dtype), request.queries[max(first - known, 0) :]))[: end - first]


def tensors_of(cache: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return cache if isinstance(cache, tuple) else (cache,)


def poison(tensor: Tensor) -> None:
    """NaN where floats lie, large codes else, as a request that failed may leave them: one read by mistake shows."""
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN as float8_e4m3fn, 127 as int8
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)


def batch_of(parts: Sequence[Part], size: int, device: torch.device, width: int = 0) -> Batch:
    """One call as tensors; the block table is at least `width` blocks wide."""
    tables = [part.request.table for part in parts]
    width = max(width, *map(len, tables))
    positions = [torch.arange(part.first, part.end) for part in parts]
    slots = [torch.tensor(t)[p // size] * size + p % size for t, p in zip(tables, positions, strict=True)]
    counts, ends = tuple(part.end - part.first for part in parts), tuple(part.end for part in parts)
    starts = torch.tensor([0, *counts]).cumsum(0)
    table = torch.tensor([[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int32)
    return Batch(
        tokens=torch.zeros(sum(counts), dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        block_table=table.to(device),
        query_start=starts.to(torch.int32).to(device),
        kv_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        logit_rows=(starts[1:] - 1).to(device),
        query_lens_host=counts,
        kv_lens_host=ends,
    )
