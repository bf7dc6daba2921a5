"""Attention with plain PyTorch: the reference the other backends are tested against. Runs on any device, in any dtype.

Blocks are gathered into contiguous keys and values, then attended to: decodes together, padded to the longest among
neighbours of similar length; each prefill chunk by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.plugins.attention.eight_bit import FORMS, as_bytes, decode, encode, zeros

# keys, values: each [num_blocks, block_size, kv_heads, head_dim]; in 8 bits their scales follow, [..., kv_heads]
Cache = tuple[Tensor, ...]
WASTE = 1.25  # decodes padded together read at most so many times the keys they need


class Decodes(NamedTuple):
    """Requests with one query each, of similar length."""

    rows: Tensor | None  # int64 [B]; None: the batch holds nothing else
    table: Tensor  # int64 [B * W]
    mask: Tensor | None  # [B, 1, 1, W * block_size], added to the logits: 0 or -inf; None: every key counts
    stale: Tensor | None  # int64 [N], of the B * W * block_size gathered, those no request of the group wrote


class Prefill(NamedTuple):
    """A chunk of one request."""

    rows: slice
    table: Tensor  # int64 [W], the blocks some query of the chunk can see
    num_keys: int  # of these blocks, from their start
    mask: Tensor | None  # bool [queries, num_keys]; None: causal and square


class Plan(NamedTuple):
    layer: LayerSpec
    slots: Tensor
    decodes: list[Decodes]
    prefills: list[Prefill]


@dataclass
class TorchAttention:
    """Gathers blocks and calls scaled_dot_product_attention; softcap and sinks are computed openly. What an 8-bit cache
    holds is dequantized as it is gathered."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        cache_dtypes=frozenset(FORMS), window=True, softcap=True, sinks=True, v_head_dim=True, auto_rank={"any": 10}
    )

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        kept = FORMS.get(spec.cache_dtype, dtype)

        def one(layer: LayerSpec) -> Cache:
            shape = (spec.num_blocks, spec.block_size, layer.num_kv_heads)
            sides = [zeros((*shape, n), kept, device) for n in (layer.head_dim, layer.v_head_dim or layer.head_dim)]
            scales = [zeros(shape, torch.float32, device) for _ in sides] if spec.cache_dtype in FORMS else []
            return (*sides, *scales)

        return [one(layer) for layer in spec.layers]

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        queries, keys, table = batch.query_lens_host, batch.kv_lens_host, batch.block_table.long()
        starts = batch.query_start.tolist()
        decodes = sorted((b for b, n in enumerate(queries) if n == 1), key=lambda b: keys[b])
        groups: list[list[int]] = []
        total = 0
        for b in decodes:
            total += keys[b]
            if groups and keys[b] * (len(groups[-1]) + 1) <= WASTE * total:
                groups[-1].append(b)
            else:
                groups.append([b])
                total = keys[b]
        alone = len(groups) == 1 and len(decodes) == len(queries)
        return Plan(
            layer,
            batch.slots,
            [_decodes(sorted(group), keys, None if alone else starts, table, layer, block_size) for group in groups],
            [
                _prefill(slice(starts[b], starts[b + 1]), n, keys[b], table[b], layer, block_size)
                for b, n in enumerate(queries)
                if n > 1
            ],
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, plan: Plan, sinks: Tensor | None) -> Tensor:
        sides = _sides(cache)
        for side, new in zip(sides, (k, v), strict=True):
            side.store(plan.slots, new)
        if len(plan.decodes) == 1 and plan.decodes[0].rows is None:
            return _attend_decodes(q, sides, plan.decodes[0], plan.layer, sinks)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        for group in plan.decodes:
            out[group.rows] = _attend_decodes(q[group.rows], sides, group, plan.layer, sinks)
        for chunk in plan.prefills:
            out[chunk.rows] = _attend_prefill(q[chunk.rows], sides, chunk, plan.layer, sinks)
        return out


class Side(NamedTuple):
    """The keys, or the values, of one layer."""

    kept: Tensor  # [num_blocks, block_size, kv_heads, dim]
    scales: Tensor | None  # float32 [num_blocks, block_size, kv_heads]; None: kept as floats

    def store(self, slots: Tensor, new: Tensor) -> None:
        if self.scales is None:
            self.kept.flatten(0, 1).index_copy_(0, slots, new.to(self.kept.dtype))
            return
        codes, scales = encode(new, self.kept.dtype)
        as_bytes(self.kept).flatten(0, 1).index_copy_(0, slots, as_bytes(codes))
        self.scales.flatten(0, 1).index_copy_(0, slots, scales)

    def gather(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        """[W * block_size, kv_heads, dim] of the W blocks in `table`."""
        if self.scales is None:
            return self.kept.index_select(0, table).flatten(0, 1).to(dtype)
        codes = as_bytes(self.kept).index_select(0, table).view(self.kept.dtype)
        return decode(codes, self.scales.index_select(0, table), dtype).flatten(0, 1)


def _sides(cache: Cache) -> tuple[Side, Side]:
    keys, values, *scales = cache
    return Side(keys, scales[0] if scales else None), Side(values, scales[1] if scales else None)


def _decodes(
    group: list[int], keys: tuple[int, ...], starts: list[int] | None, table: Tensor, layer: LayerSpec, block_size: int
) -> Decodes:
    device = table.device
    lens = torch.tensor([keys[b] for b in group], device=device)
    longest = max(keys[b] for b in group)
    seen = table[torch.tensor(group, device=device), : -(-longest // block_size)]
    at = torch.arange(seen.shape[1] * block_size, device=device)
    mask = at < lens[:, None]
    stale = (~mask).flatten().nonzero()[:, 0]
    if layer.window is not None:
        mask &= at >= (lens - layer.window)[:, None]
    rows = None if starts is None else torch.tensor([starts[b] for b in group], device=device)
    added = torch.zeros(mask.shape, device=device).masked_fill_(~mask, float("-inf"))
    return Decodes(
        rows, seen.flatten(), None if bool(mask.all()) else added[:, None, None], stale if len(stale) else None
    )


def _prefill(rows: slice, num_q: int, num_k: int, table: Tensor, layer: LayerSpec, block_size: int) -> Prefill:
    first = (
        0 if layer.window is None else max(0, num_k - num_q - layer.window + 1) // block_size
    )  # blocks before: unseen
    table = table[first : -(-num_k // block_size)]
    num_k -= first * block_size
    if num_q == num_k and (layer.window is None or layer.window >= num_k):
        return Prefill(rows, table, num_k, None)
    mask = torch.ones(num_q, num_k, dtype=torch.bool, device=table.device).tril(num_k - num_q)
    if layer.window is not None:
        mask = mask.triu(num_k - num_q - layer.window + 1)
    return Prefill(rows, table, num_k, mask)


def _attend_decodes(
    q: Tensor, sides: tuple[Side, Side], group: Decodes, layer: LayerSpec, sinks: Tensor | None
) -> Tensor:
    """q: [B, heads, head_dim]. Heads that share keys become the query dimension, so no key is repeated."""
    q = q.reshape(q.shape[0], layer.num_kv_heads, -1, q.shape[-1])  # [B, kv_heads, group, head_dim]
    k, v = (
        _clean(side.gather(group.table, q.dtype), group.stale).view(len(q), -1, *side.kept.shape[2:]).transpose(1, 2)
        for side in sides
    )
    mask = None if group.mask is None else group.mask.to(q.dtype)
    if layer.softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    else:
        sinks = None if sinks is None else sinks.view(1, layer.num_kv_heads, -1, 1)
        out = _open_attention(q, k, v, None if mask is None else mask == 0, layer, sinks)
    return out.flatten(1, 2)


def _clean(found: Tensor, stale: Tensor | None) -> Tensor:
    """What others left behind becomes 0: NaN would outlive a weight of 0."""
    return found if stale is None else found.index_fill_(0, stale, 0.0)


def _attend_prefill(
    q: Tensor, sides: tuple[Side, Side], chunk: Prefill, layer: LayerSpec, sinks: Tensor | None
) -> Tensor:
    """q: [queries, heads, head_dim]."""
    q = q.transpose(0, 1)  # [heads, queries, head_dim]
    k, v = (side.gather(chunk.table, q.dtype)[: chunk.num_keys].transpose(0, 1) for side in sides)
    if layer.softcap is None and sinks is None and chunk.num_keys >= q.shape[1]:
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], chunk.mask, is_causal=chunk.mask is None, scale=layer.scale, enable_gqa=True
        )[0]
    else:
        mask = chunk.mask
        if mask is None:
            mask = torch.ones(q.shape[1], chunk.num_keys, dtype=torch.bool, device=q.device).tril()
        grouped = q.reshape(layer.num_kv_heads, -1, *q.shape[1:])
        sinks = None if sinks is None else sinks.view(layer.num_kv_heads, -1, 1, 1)
        out = _open_attention(grouped, k[:, None], v[:, None], mask, layer, sinks).flatten(0, 1)
    return out.transpose(0, 1)


def _open_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: LayerSpec, sinks: Tensor | None
) -> Tensor:
    """Softmax written out, in float32 or wider: softcap on the logits, then the mask, a sink logit joining each softmax
    (gpt-oss), and zeros for rows that see nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.to(wide).expand(*logits.shape[:-1], 1)), -1)
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    return (weights[..., : k.shape[-2]] @ v.to(wide)).to(q.dtype)
