"""Native paged attention for the CPU: the cache is read once, in place; nothing is gathered."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.plugins import native

Cache = tuple[Tensor, Tensor]  # keys, values: each [num_blocks, block_size, kv_heads, head_dim]


class Plan(NamedTuple):
    native: native.Plan
    v_dim: int
    batch: Batch  # its tensors must outlive the pointers


@dataclass
class CpuAttention:
    """Own kernels in C++, compiled for this machine when first chosen: vectors as wide as it has, long key ranges split
    over the threads. Computes in float32."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        window=True,
        softcap=True,
        sinks=True,
        v_head_dim=True,
    )

    @staticmethod
    def obstacle() -> str | None:
        """Why it can't be had on this machine."""
        return native.obstacle()

    @staticmethod
    def kernels() -> str:
        return native.kernels()

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        """Zeros whose pages take memory only when they are written. Raises NativeError when the kernels don't build."""
        self._attend = native.library().turnout_attend

        def one(layer: LayerSpec, size: int) -> Tensor:
            shape = (spec.num_blocks, spec.block_size, layer.num_kv_heads, size)
            return torch.from_numpy(np.zeros(math.prod(shape), dtype=np.float32)).view(shape)

        return [(one(layer, layer.head_dim), one(layer, layer.v_head_dim or layer.head_dim)) for layer in spec.layers]

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        v_dim = layer.v_head_dim or layer.head_dim
        return Plan(
            native.Plan(
                batch.block_table.data_ptr(),
                batch.query_start.data_ptr(),
                batch.kv_lens.data_ptr(),
                batch.slots.data_ptr(),
                len(batch.kv_lens),
                batch.block_table.shape[1],
                len(batch.slots),
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                v_dim,
                block_size,
                layer.window or 0,
                torch.get_num_threads(),
                layer.scale,
                layer.softcap or 0.0,
            ),
            v_dim,
            batch,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, plan: Plan, sinks: Tensor | None) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        out = torch.empty(q.shape[0], q.shape[1], plan.v_dim)
        self._attend(
            ctypes.byref(plan.native),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            cache[0].data_ptr(),
            cache[1].data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        return out
