"""Paged attention as two loops, right by inspection, with a switch for each fault that its users have had elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.plugins.attention.eight_bit import FORMS, decode, encode, zeros

Cache = tuple[Tensor, ...]  # keys, values: [num_blocks, block_size, kv_heads, dim]; of 8 bits, their scales behind them


class Plan(NamedTuple):
    batch: Batch
    kv_lens: list[int]  # when it was made
    layer: LayerSpec
    size: int


@dataclass
class LoopAttention:
    """One request after the other, one query after the other."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        head_dims=frozenset({64, 40, 32}),  # 32: half of 64, for values
        block_sizes=frozenset({16, 5}),
        cache_dtypes=frozenset({"int8"}),
        window=True,
        softcap=True,
        sinks=True,
        v_head_dim=True,
        batch_invariant=True,
        graphs=True,
    )
    fault: ClassVar[str] = ""

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        caches: list[Cache] = []
        kept = FORMS.get(spec.cache_dtype, dtype)
        for layer in spec.layers:
            shape = (spec.num_blocks, spec.block_size, layer.num_kv_heads)
            sides = [zeros((*shape, n), kept, device) for n in (layer.head_dim, layer.v_head_dim or layer.head_dim)]
            caches.append((*sides, *(zeros(shape, torch.float32, device) for _ in sides if kept != dtype)))
        if self.fault == "scales for all blocks" and spec.cache_dtype != "auto":
            caches = [(*c[:2], *(side.view(1, -1, *side.shape[2:]) for side in c[2:])) for c in caches]
        if self.fault == "codes in 16 bits" and spec.cache_dtype != "auto":
            caches = [(*c, torch.empty_like(c[0], dtype=torch.int8)) for c in caches]
        if self.fault == "a cache for all layers":
            return caches[:1] * len(caches)
        return caches

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        return Plan(batch, batch.kv_lens.tolist(), layer, block_size)

    def refresh(self, plan: Plan, batch: Batch, layer: LayerSpec, block_size: int) -> None:
        """Nothing to do: `run` reads the tensors themselves."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, plan: Plan, sinks: Tensor | None) -> Tensor:
        batch, layer = plan.batch, plan.layer
        slots = batch.slots + (self.fault == "keys written one slot on") * (batch.slots % plan.size != plan.size - 1)
        for side, new in enumerate((k, v)):
            self._store(cache, side, slots, new)
        out = torch.empty(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype)
        starts = batch.query_start.tolist()
        lens = plan.kv_lens if self.fault == "a plan that keeps its first lengths" else batch.kv_lens.tolist()
        for b, num_k in enumerate(lens):
            keys, values = (self._read(cache, side, batch.block_table[b], num_k, plan) for side in (0, 1))
            for row in range(starts[b], starts[b + 1]):
                last = num_k - (starts[b + 1] - row)
                if self.fault == "a causal mask anchored top left" and starts[b + 1] - starts[b] > 1:
                    last = min(row - starts[b], num_k - 1)
                out[row] = self._attend(q[row], keys, values, last, layer, sinks)
        alone = len(lens) == 1 and self.fault == "another rounding for a request alone"
        return out * (1 + torch.finfo(q.dtype).eps) if alone else out

    def _store(self, cache: Cache, side: int, slots: Tensor, new: Tensor) -> None:
        kept = cache[side]
        if self.fault == "padding written to block 0":
            kept[0, 0] = 0
        if len(cache) == 2:
            kept.flatten(0, 1)[slots] = new.to(kept.dtype)
            return
        codes, scales = encode(new, kept.dtype)
        kept.view(torch.uint8).flatten(0, 1)[slots] = codes.view(torch.uint8)
        cache[2 + side].flatten(0, 1)[slots] = scales

    def _read(self, cache: Cache, side: int, table: Tensor, num: int, plan: Plan) -> Tensor:
        """Float64 [num, kv_heads, dim], gathered by the offset of each block's first element."""
        kept, size = cache[side], plan.size
        blocks = table[: -(-num // size)].tolist()
        if self.fault == "two blocks swapped" and len(blocks) > 1:
            blocks[:2] = blocks[1::-1]
        if self.fault == "the last part-full block dropped" and len(blocks) > 1 and num % size:
            blocks[-1] = blocks[-2]
        each = kept[0].numel()
        offsets = np.array(blocks, dtype=np.int64) * each
        if self.fault == "offsets in 32 bits":
            offsets = offsets.astype(np.int32).astype(np.int64) % kept.numel()
        raw = kept.view(torch.uint8).view(-1) if len(cache) == 4 else kept.view(-1)
        found = [raw[at : at + each].view(kept.dtype).view(kept.shape[1:]) for at in offsets.tolist()]
        if not found:
            return torch.zeros(0, *kept.shape[2:], dtype=torch.float64)
        if len(cache) == 2:
            whole = torch.cat(found).double()
            spoilt = self.fault == "what others left read under the mask"
            return whole[:num] + 0.0 * whole.sum(0) if spoilt else whole[:num]
        scales = torch.cat([cache[2 + side][block] for block in blocks])
        if self.fault == "scales of the token before":
            scales = scales.roll(1, 0)
        return decode(torch.cat(found), scales, torch.float64)[:num]

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, last: int, layer: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        """q: [heads, dim]; sees the keys up to `last`."""
        window = None if layer.window is None else layer.window + (self.fault == "a window off by one")
        first = 0 if window is None else max(0, last - window + 1)
        group = layer.num_heads // layer.num_kv_heads
        owner = torch.arange(layer.num_heads) // group
        if self.fault == "heads interleaved among key heads":
            owner = torch.arange(layer.num_heads) % layer.num_kv_heads
        keys, values = keys[first : last + 1, owner], values[first : last + 1, owner]
        if last < first and self.fault != "NaN from a masked row":
            return torch.zeros(layer.num_heads, values.shape[-1], dtype=q.dtype)
        scale = layer.scale * (1.01 if self.fault == "a scale off by 1 %" else 1.0)
        logits = torch.einsum("hd,khd->hk", q.double(), keys)
        cap = layer.softcap
        if self.fault == "softcap before the scale":
            logits = (logits if cap is None else cap * torch.tanh(logits / cap)) * scale
        else:
            logits = logits * scale if cap is None else cap * torch.tanh(logits * scale / cap)
        if sinks is not None and self.fault != "sinks ignored":
            logits = torch.cat((logits, sinks.double()[:, None]), 1)
        if not logits.shape[1]:
            return torch.full((layer.num_heads, values.shape[-1]), float("nan"), dtype=q.dtype)
        weights = torch.softmax(logits, 1)[:, : keys.shape[0]]
        return torch.einsum("hk,khd->hd", weights, values).to(q.dtype)


def broken(fault: str, **others: Any) -> type:
    """LoopAttention with a fault in it."""
    return type("Broken", (LoopAttention,), {"fault": fault, **others})
