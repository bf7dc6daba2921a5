"""Native paged attention for the CPU: the cache is read once, in place; nothing is gathered."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.kernels import cpu as native
from turnout.plugins.attention.eight_bit import FORMS

# keys [num_blocks, kv_heads, head_dim, block_size], values [num_blocks, kv_heads, block_size, v_head_dim]; of an 8-bit
# cache also the scales of keys and of values, float32 [num_blocks, kv_heads, block_size]: value = code * scale
Cache = tuple[Tensor, ...]
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as turnout_attend numbers them
LINE = 64  # bytes
CACHES = {torch.int8: 1, torch.float8_e4m3fn: 2}  # 0: as q


class NativePlan(ctypes.Structure):
    """What is the same for every layer; `struct Plan` of attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("table", "query_start", "kv_lens", "slots")),
        *((name, ctypes.c_int64) for name in ("num_requests", "table_width", "num_tokens")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "v_dim", "block_size", "window", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class NativeTensors(ctypes.Structure):
    """One layer's data; `struct Tensors` of attention.cpp."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in ("q", "k", "v", "keys", "values", "k_scales", "v_scales", "sinks", "out")
    ]


class Plan(NamedTuple):
    native: NativePlan
    v_dim: int
    batch: Batch  # its tensors must outlive the pointers


@dataclass
class CpuAttention:
    """Own kernels in C++, compiled for this machine when first chosen: vectors as wide as it has, long key ranges split
    over the threads. Computes in float32, whatever the model's dtype and the cache's."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(KINDS),
        cache_dtypes=frozenset(FORMS),
        window=True,
        softcap=True,
        sinks=True,
        v_head_dim=True,
        batch_invariant=True,
        auto_rank={"cpu": 20},
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
        self._attend = _attend(native.library())
        codes = FORMS.get(spec.cache_dtype)

        def one(layer: LayerSpec) -> Cache:
            rows = (spec.num_blocks, layer.num_kv_heads, spec.block_size)
            keys = _zeros((*rows[:2], layer.head_dim, spec.block_size), codes or dtype)
            values = _zeros((*rows, layer.v_head_dim or layer.head_dim), codes or dtype)
            if codes is None:
                return keys, values
            return keys, values, _zeros(rows, torch.float32), _zeros(rows, torch.float32)

        return [one(layer) for layer in spec.layers]

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        v_dim = layer.v_head_dim or layer.head_dim
        return Plan(
            NativePlan(
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
        q, k, v = q.contiguous(), k.to(q.dtype).contiguous(), v.to(q.dtype).contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        out = torch.empty(q.shape[0], q.shape[1], plan.v_dim, dtype=q.dtype)
        tensors = (q, k, v, cache[0], cache[1], *(cache[2:] or (None, None)), sinks, out)
        pointers = NativeTensors(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
        kept = cache[0].dtype
        assert kept in CACHES or kept == q.dtype, f"a cache of {kept} for queries of {q.dtype}"
        assert all(t is None or t.device.type == "cpu" and t.is_contiguous() for t in tensors), "on the CPU, end to end"
        native.check(
            self._attend(ctypes.byref(plan.native), ctypes.byref(pointers), KINDS[q.dtype], CACHES.get(kept, 0))
        )
        return out


@functools.cache
def _attend(library: ctypes.CDLL) -> Callable[..., int]:
    function = library.turnout_attend
    function.argtypes = [ctypes.POINTER(NativePlan), ctypes.POINTER(NativeTensors), ctypes.c_int, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """It begins at a cache line: vectors that cross lines take twice the time to load."""
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + LINE, dtype=np.uint8)
    start = -room.ctypes.data % LINE
    return torch.from_numpy(room[start : start + size]).view(dtype).view(shape)
