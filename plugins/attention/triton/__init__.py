"""Our own Triton kernels: one pass over the paged cache for prompts and decodes alike, split over keys where they are few.

Importing this imports no Triton; the kernels are compiled when they are first launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.kernels.triton import has_fp8, interpreted, launching_on, num_processors, power_of_two
from turnout.plugins.attention.eight_bit import as_bytes, zeros
from turnout.plugins.attention.triton.shapes import Launch, decode_launch, parts, prompt_launch

LOG2_E = 1.4426950408889634
STORED_TILE = 4096  # elements of keys one program stores at a time
FORMS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

# keys, values: [num_blocks, block_size, kv_heads, dim]; of an 8-bit cache also their scales, float32 [.., kv_heads]
Cache = tuple[Tensor, ...]


class Tiles(NamedTuple):
    """Queries that one launch answers."""

    launch: Launch
    num: int
    queries: int  # of one tile, at most
    request: Tensor | None  # int32 [num]; None: tile i is the only query of request i
    first: Tensor | None  # int32 [num], the tile's first query in its request
    splits: int  # parts of the keys, each a program
    parts: tuple[Tensor, Tensor] | None  # float32 [num, heads, splits, v_head_dim] and [num, heads, splits]


class Plan(NamedTuple):
    layer: LayerSpec
    batch: Batch
    block_size: int
    tiles: list[Tiles]  # of the decodes, then of the prompts


@dataclass
class TritonAttention:
    """Own kernels in Triton for GPUs from Ampere on. Options left unset follow head size and dtype."""

    block_m: int | None = None  # rows of a prompt's tile, a power of two: queries times heads that share a key head
    block_n: int | None = None  # keys of a prompt's tile, a power of two
    num_warps: int | None = None  # of a prompt's program
    num_stages: int | None = None  # of a prompt's loop: tiles of keys in flight
    decode_block_n: int | None = None  # keys of a decode's tile, a power of two
    decode_warps: int | None = None
    decode_stages: int | None = None
    num_splits: int | None = None  # programs that share the keys of a decode

    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        head_dims=frozenset(range(8, 257, 8)),
        cache_dtypes=frozenset({"int8", "fp8"}),
        window=True,
        softcap=True,
        sinks=True,
        v_head_dim=True,
        graphs=True,
        needs=("triton",),
        auto_rank={"cuda": 30},
    )

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "decode_block_n"):
            size = getattr(self, name)
            if size is not None and (size < 16 or size & (size - 1)):
                raise ValueError(f"attention.{name} must be a power of two of at least 16, got {size}")
        for name in ("num_warps", "decode_warps"):
            if getattr(self, name) not in (None, 1, 2, 4, 8, 16):
                raise ValueError(f"attention.{name} must be 1, 2, 4, 8 or 16, got {getattr(self, name)}")
        for name in ("num_stages", "decode_stages", "num_splits"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"attention.{name} must be at least 1, got {getattr(self, name)}")

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        """Zeros. float8_e4m3fn is kept as bytes, which torch can copy on every device."""
        from turnout.kernels.triton import attention as kernels

        self._kernels: Any = kernels
        self._interpreted = interpreted(kernels.attend)
        if device.type == "cpu" and not self._interpreted:
            raise ValueError(
                "attention=triton computes on a GPU; on a CPU only in Triton's interpreter, for tests: set "
                "TRITON_INTERPRET=1 before anything imports triton"
            )
        self._dtype, self._form = dtype, spec.cache_dtype if spec.cache_dtype in FORMS else "float"
        if self._form == "fp8" and has_fp8(device) and not self._interpreted:
            self._form = "fp8_native"
        kept = FORMS.get(spec.cache_dtype, dtype)

        def one(layer: LayerSpec) -> Cache:
            rows = (spec.num_blocks, spec.block_size, layer.num_kv_heads)
            sizes = (layer.head_dim, layer.v_head_dim or layer.head_dim)
            codes = [zeros((*rows, size), kept, device) for size in sizes]
            if kept == dtype:
                return tuple(codes)
            scales = [zeros(rows, torch.float32, device) for _ in sizes]
            return (*(as_bytes(side) if kept == torch.float8_e4m3fn else side for side in codes), *scales)

        return [one(layer) for layer in spec.layers]

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        counts = batch.query_lens_host
        decodes = [b for b, count in enumerate(counts) if count == 1]
        tiles = []
        if decodes:
            tiles.append(self._decodes(batch, layer, block_size, decodes))
        if len(decodes) < len(counts):
            tiles.append(self._prompts(batch, layer, counts))
        return Plan(layer, batch, block_size, tiles)

    def refresh(self, plan: Plan, batch: Batch, layer: LayerSpec, block_size: int) -> None:
        """Nothing to do: the kernels read lengths, blocks and slots from the batch's own tensors."""
        whole = len(plan.tiles) == 1 and plan.tiles[0].request is None
        same = all(
            getattr(batch, name).data_ptr() == getattr(plan.batch, name).data_ptr()
            for name in ("slots", "block_table", "query_start", "kv_lens")
        )
        if not whole or not same or batch.query_lens_host != plan.batch.query_lens_host:
            raise ValueError("a plan can be refreshed for a batch of decodes only, in the tensors it was made of")

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, plan: Plan, sinks: Tensor | None) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype, device=q.device)
        with launching_on(q.device):
            self._store(k, v, cache, plan)
            for tiles in plan.tiles:
                self._attend(q, cache, plan, tiles, sinks, out)
        return out

    def _launch(self, layer: LayerSpec, decode: bool) -> Launch:
        pad = _pad(max(layer.head_dim, layer.v_head_dim or 0))
        group = layer.num_heads // layer.num_kv_heads
        found = (decode_launch if decode else prompt_launch)(pad, self._dtype.itemsize, group)
        asked = {
            "block_m": None if decode or self.block_m is None else power_of_two(group, self.block_m),
            "block_n": self.decode_block_n if decode else self.block_n,
            "num_warps": self.decode_warps if decode else self.num_warps,
            "num_stages": self.decode_stages if decode else self.num_stages,
        }
        return replace(found, **{name: value for name, value in asked.items() if value is not None})

    def _decodes(self, batch: Batch, layer: LayerSpec, block_size: int, requests: list[int]) -> Tiles:
        device, num = batch.slots.device, len(requests)
        launch = self._launch(layer, decode=True)
        most_keys = batch.block_table.shape[1] * block_size
        found = parts(num, layer.num_kv_heads, most_keys, launch.block_n, num_processors(device))
        splits = self.num_splits or found
        request = first = room = None
        if num < len(batch.query_lens_host):
            request, first = _to(device, [requests, [0] * num])
        if splits > 1:
            shape, size = (num, layer.num_heads, splits), layer.v_head_dim or layer.head_dim
            room = (torch.empty(*shape, size, device=device), torch.empty(shape, device=device))
        return Tiles(launch, num, 1, request, first, splits, room)

    def _prompts(self, batch: Batch, layer: LayerSpec, counts: tuple[int, ...]) -> Tiles:
        launch = self._launch(layer, decode=False)
        queries = launch.block_m // (layer.num_heads // layer.num_kv_heads)
        # Later tiles see more keys: those first, so that the last programs to start are short.
        each = [(b, at) for b, n in enumerate(counts) if n > 1 for at in reversed(range(0, n, queries))]
        request, first = _to(batch.slots.device, [list(column) for column in zip(*each, strict=True)])
        return Tiles(launch, len(each), queries, request, first, 1, None)

    def _store(self, k: Tensor, v: Tensor, cache: Cache, plan: Plan) -> None:
        heads, pad, v_pad = k.shape[1], _pad(k.shape[-1]), _pad(v.shape[-1])
        rows, tile = len(k) * heads, (STORED_TILE << 4 * self._interpreted) // max(pad, v_pad)
        scales = cache[2:] or (None, None)
        self._kernels.store[(-(-rows // tile),)](
            k, v, cache[0], cache[1], *scales, plan.batch.slots, rows,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            HEADS=heads, TILE=tile, DIM=k.shape[-1], V_DIM=v.shape[-1], PAD=pad, V_PAD=v_pad,
            FORM=self._form, INTERPRETED=self._interpreted, num_warps=4,
        )  # fmt: skip

    def _attend(self, q: Tensor, cache: Cache, plan: Plan, tiles: Tiles, sinks: Tensor | None, out: Tensor) -> None:
        layer, batch, launch = plan.layer, plan.batch, tiles.launch
        heads, dim, v_dim = layer.num_kv_heads, layer.head_dim, out.shape[-1]
        cap = layer.softcap
        scales = cache[2:] or (None, None)
        part_out, part_size = tiles.parts or (None, None)
        self._kernels.attend[(tiles.num, heads, tiles.splits)](
            q, cache[0], cache[1], *scales, sinks, out, part_out, part_size,
            batch.block_table, batch.query_start, batch.kv_lens, tiles.request, tiles.first,
            q.stride(0), q.stride(1), batch.block_table.stride(0),
            layer.scale / cap if cap is not None else layer.scale * LOG2_E, (cap or 0.0) * LOG2_E,
            layer.window or 0, tiles.splits,
            HEADS=heads, GROUP=layer.num_heads // heads, QUERIES=tiles.queries,
            DIM=dim, V_DIM=v_dim, PAD=_pad(dim), V_PAD=_pad(v_dim),
            BLOCK_SIZE=plan.block_size, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
            FORM=self._form, MAPPED=tiles.request is not None, SPLIT=tiles.splits > 1,
            WINDOWED=layer.window is not None, CAPPED=cap is not None, SINKS=sinks is not None,
            INTERPRETED=self._interpreted, num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
        if tiles.splits > 1:
            self._kernels.reduce[(tiles.num, layer.num_heads)](
                part_out, part_size, sinks, out, batch.query_start, tiles.request, tiles.splits,
                HEADS=layer.num_heads, V_DIM=v_dim, V_PAD=_pad(v_dim), SPLITS_PAD=power_of_two(tiles.splits),
                MAPPED=tiles.request is not None, SINKS=sinks is not None, INTERPRETED=self._interpreted, num_warps=4,
            )  # fmt: skip


def _pad(dim: int) -> int:
    """Sizes inside a kernel are powers of two, and 16 at least where a matrix product is."""
    return power_of_two(dim, 16)


def _to(device: torch.device, rows: list[list[int]]) -> Tensor:
    """int32 [len(rows), n], one copy to the device."""
    return torch.from_numpy(np.array(rows, dtype=np.int32)).to(device)
