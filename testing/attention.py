"""The truth about attention, in float64 and one query at a time, and ragged cases over a shuffled, poisoned cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnout.core.interfaces import AttentionBackend, Capabilities
from turnout.core.types import Batch, KVSpec, LayerSpec

Lens = tuple[tuple[int, int], ...]  # (queries, keys) of each request


@dataclass(frozen=True)
class AttentionCase:
    """One call: requests with `lens`, their earlier keys already in the cache."""

    name: str
    layer: LayerSpec
    lens: Lens
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


def attention_oracle(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, sinks: Tensor | None) -> Tensor:
    """q: [queries, heads, dim], the last ones of a sequence whose keys and values are k, v: [keys, kv_heads, dim].

    Query i sits at position keys - queries + i and sees the keys up to there, the last `window` of them. float64 out.
    """
    num_q, num_k, group = q.shape[0], k.shape[0], layer.num_heads // layer.num_kv_heads
    out = torch.zeros(num_q, layer.num_heads, v.shape[-1], dtype=torch.float64)
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    for i in range(num_q):
        last = num_k - num_q + i
        first = 0 if layer.window is None else max(0, last - layer.window + 1)
        if last < first:
            continue  # sees nothing: zeros
        for head in range(layer.num_heads):
            logits = k[first : last + 1, head // group] @ q[i, head] * layer.scale
            if layer.softcap is not None:
                logits = layer.softcap * torch.tanh(logits / layer.softcap)
            if sinks is not None:
                logits = torch.cat((logits, sinks[head].double().cpu()[None]))
            weights = torch.softmax(logits, 0)[: last - first + 1]
            out[i, head] = weights @ v[first : last + 1, head // group]
    return out


def run_attention(backend: AttentionBackend[Any, Any], case: AttentionCase, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The backend's output and the oracle's, [T, heads, v_head_dim].

    Earlier keys go in by the backend's own path, as one prefill; blocks are shuffled, and unused ones hold poison.
    """
    layer, size = case.layer, case.block_size
    generator = torch.Generator().manual_seed(seed)
    widths = [max(-(-keys // size), 1) for _, keys in case.lens]
    num_blocks = sum(widths) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [[order.pop() for _ in range(width)] for width in widths]
    (cache,) = backend.allocate(KVSpec((layer,), size, num_blocks), case.dtype, torch.device(case.device))
    for tensor in cache if isinstance(cache, tuple) else (cache,):
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))  # as a request that failed may leave it: one value read by mistake spoils all

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    dim, v_dim = layer.head_dim, layer.v_head_dim or layer.head_dim
    sinks = noise(layer.num_heads).to(case.device) if layer.sinks else None
    keys = [noise(n, layer.num_kv_heads, dim) for _, n in case.lens]
    values = [noise(n, layer.num_kv_heads, v_dim) for _, n in case.lens]
    queries = [noise(n, layer.num_heads, dim) for n, _ in case.lens]

    def call(parts: list[tuple[int, int, int]], q: Tensor) -> Tensor:
        """parts: (request, first new key, keys after this call)."""
        k = torch.cat([keys[b][first:end] for b, first, end in parts]).to(case.device)
        v = torch.cat([values[b][first:end] for b, first, end in parts]).to(case.device)
        batch = _batch([(tables[b], first, end) for b, first, end in parts], size, case.device)
        return backend.run(q.to(case.device), k, v, cache, backend.plan(batch, layer, size), sinks)

    earlier = [(b, 0, n - new) for b, (new, n) in enumerate(case.lens) if n > new]
    if earlier:
        call(earlier, torch.cat([noise(end, layer.num_heads, dim) for _, _, end in earlier]))
    got = call([(b, n - new, n) for b, (new, n) in enumerate(case.lens)], torch.cat(queries))
    want = torch.cat([attention_oracle(q, k, v, layer, sinks) for q, k, v in zip(queries, keys, values, strict=True)])
    return got.cpu(), want


def _batch(parts: list[tuple[list[int], int, int]], size: int, device: str) -> Batch:
    positions = [torch.arange(first, end) for _, first, end in parts]
    slots = [
        torch.tensor(table)[p // size] * size + p % size for (table, _, _), p in zip(parts, positions, strict=True)
    ]
    counts = [end - first for _, first, end in parts]
    width = max(len(table) for table, _, _ in parts)
    starts = torch.tensor([0, *counts]).cumsum(0)
    return Batch(
        tokens=torch.zeros(sum(counts), dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        block_table=torch.tensor([t + [0] * (width - len(t)) for t, _, _ in parts], dtype=torch.int32, device=device),
        query_start=starts.to(torch.int32).to(device),
        kv_lens=torch.tensor([end for _, _, end in parts], dtype=torch.int32, device=device),
        logit_rows=(starts[1:] - 1).to(device),
        query_lens_host=tuple(counts),
        kv_lens_host=tuple(end for _, _, end in parts),
    )


def attention_cases(capabilities: Capabilities, device: str = "cpu") -> Iterator[AttentionCase]:
    """The grid: ragged and block-boundary lengths, head ratios and sizes, block sizes, every feature claimed."""
    ragged: Lens = ((1, 1), (5, 5), (1, 40), (7, 23), (33, 33), (1, 17))
    sizes = [s for s in (64, 80, 128, 32, 96) if capabilities.head_dims is None or s in capabilities.head_dims]
    blocks = [s for s in (16, 8, 32, 64, 4) if capabilities.block_sizes is None or s in capabilities.block_sizes]
    dim, block = sizes[0], blocks[0]
    edges: Lens = tuple((1, n) for n in (block - 1, block, block + 1, 2 * block)) + tuple(
        (new, old + new) for old in (1, block - 1, block, block + 1) for new in (2, block)
    )

    def case(
        name: str, lens: Lens = ragged, heads: int = 6, kv_heads: int = 2, block_size: int = block, **rest: Any
    ) -> AttentionCase:
        spec = {"head_dim": dim, "scale": dim**-0.5} | rest
        return AttentionCase(name, LayerSpec(heads, kv_heads, **spec), lens, block_size, device=device)

    yield case("ragged prefills and decodes in one call")
    yield case("lengths at block boundaries", edges)
    yield from (case(f"{ratio} heads a key head", heads=2 * ratio) for ratio in (1, 5, 7, 8, 16))
    yield case("one key head for all", heads=4, kv_heads=1)
    yield from (case(f"head size {size}", head_dim=size, scale=size**-0.5) for size in sizes[1:])
    yield from (case(f"block size {size}", block_size=size) for size in blocks[1:])
    yield case("a scale of its own", scale=0.3)
    if capabilities.window:
        yield from (case(f"a window of {w}", ragged + edges, window=w) for w in (1, 3, block, block + 1))
    if capabilities.softcap:
        yield case("logit softcap", softcap=2.0)
    if capabilities.sinks:
        yield case("attention sinks", sinks=True)
    if capabilities.window and capabilities.sinks:
        yield case("attention sinks in a window", window=5, sinks=True)
    if capabilities.v_head_dim:
        yield case("values of another head size", v_head_dim=dim // 2)
