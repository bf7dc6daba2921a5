"""Attention through FlashInfer's wrappers for paged keys (arXiv 2501.01005). It owns the cache and two workspaces.

Decodes go to one wrapper, prefill chunks to another; each is planned once a step and group of equal layers, from lengths
the host knows. A step as FlashInfer is told it, for blocks of 4 and requests with 9 and 3 keys:

    indptr [0, 3, 4]    indices [block_table[0, :3], block_table[1, :1]]    last_page_len [1, 3]

A sink joins from the log2 of each softmax's sum: two of FlashInfer's kernels take `sinks` and drop them. In an fp8 cache
each token and head has a scale of its own, which the kernels apply (`use_token_head_sf`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.plugins.attention.eight_bit import as_bytes, encode

Cache = tuple[
    Tensor, ...
]  # keys, values [num_blocks, block_size, kv_heads, head_dim]; in fp8 then their scales, float32
Ints = npt.NDArray[np.int64]
SCALES = "use_token_head_sf"  # the argument that says each token and head of an fp8 cache has a scale of its own


class Pages(NamedTuple):
    """Where the keys of some requests lie, as FlashInfer wants to know it."""

    indptr: Tensor  # int32 [B + 1], on the host
    indices: Tensor  # int32 [indptr[-1]], on the device
    last_page_len: Tensor  # int32 [B], on the host


class Part(NamedTuple):
    """Requests served by one wrapper."""

    wrapper: Any
    rows: Tensor | None  # int64 [N], of the batch; None: all of them


@dataclass
class Plan:
    layer: LayerSpec
    slots: Tensor
    parts: list[Part]
    own: bool = False  # has a wrapper of its own, with buffers that stay


@dataclass
class FlashInfer:
    """FlashInfer's paged prefill and decode wrappers."""

    workspace_mb: int = 256  # MiB of device memory for partial results where a request's keys are split among cores

    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=frozenset({64, 128, 256}),
        cache_dtypes=frozenset({"fp8"}),
        window=True,
        softcap=True,
        sinks=True,
        graphs=True,
        needs=("flashinfer",),
        auto_rank={"cuda": 50},
    )

    def __post_init__(self) -> None:
        if self.workspace_mb < 16:
            raise ValueError(f"attention.workspace_mb must be at least 16, got {self.workspace_mb}")
        self._workspace = torch.empty(0)
        self._wrappers: dict[tuple[str, LayerSpec], Any] = {}

    @staticmethod
    def refusals(
        layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device, cache_dtype: str
    ) -> list[str]:
        """What the installed version and the card can't do."""
        reasons = []
        if cache_dtype == "fp8" and _takes_scales() is False:
            reasons.append(
                f"kv_cache_dtype is fp8, and {_named()} takes no scale for each token and head; a newer one does "
                f"(`pip install -U flashinfer-python`)"
            )
        here = device.type == "cuda" and torch.cuda.is_available()
        if here and (card := torch.cuda.get_device_capability()) < (8, 0):
            reasons.append(f"the GPU has compute capability {card[0]}.{card[1]}, it needs 8.0")
        return reasons

    @staticmethod
    def kernels() -> str:
        return _named() if importlib.util.find_spec("flashinfer") is not None else ""

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        """Zeros, in FlashInfer's layout NHD; its kernels are compiled when a plan first needs them."""
        self._library = importlib.import_module("flashinfer")
        self._dtype, self._kept = dtype, torch.float8_e4m3fn if spec.cache_dtype == "fp8" else dtype
        if self._workspace.device != device or not self._workspace.numel():
            self._workspace = torch.zeros(self.workspace_mb << 20, dtype=torch.uint8, device=device)
            self._wrappers = {}

        def one(layer: LayerSpec) -> Cache:
            shape = (spec.num_blocks, spec.block_size, layer.num_kv_heads)
            codes = (torch.zeros(*shape, layer.head_dim, dtype=self._kept, device=device) for _ in range(2))
            scales = (torch.zeros(shape, device=device) for _ in range(2 if spec.cache_dtype == "fp8" else 0))
            return (*codes, *scales)

        return [one(layer) for layer in spec.layers]

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        lens = batch.query_lens_host
        starts = np.cumsum((0, *lens))
        decodes, prefills = ([b for b, n in enumerate(lens) if (n == 1) == one] for one in (True, False))
        parts = []
        for kind, requests in (("decode", decodes), ("prefill", prefills)):
            if not requests:
                continue
            if (kind, layer) not in self._wrappers:
                self._wrappers[kind, layer] = self._made(kind, layer)
            wrapper = self._wrappers[kind, layer]
            if kind == "decode":
                self._plan_decodes(wrapper, _pages(requests, batch, block_size), layer, block_size)
            else:
                pages = _pages(requests, batch, block_size)
                self._plan_prefills(wrapper, [lens[b] for b in requests], pages, layer, block_size)
            rows = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in requests])
            alone = len(requests) == len(lens)
            parts.append(Part(wrapper, None if alone else torch.from_numpy(rows).to(batch.slots.device)))
        return Plan(layer, batch.slots, parts)

    def refresh(self, plan: Plan, batch: Batch, layer: LayerSpec, block_size: int) -> None:
        """Takes a wrapper for the plan alone the first time: call it before the launches are recorded, too."""
        if not plan.own:
            num, width = batch.block_table.shape
            buffers = {"indptr": num + 1, "indices": num * width, "last_page_len": num}
            made = {
                f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=batch.slots.device)
                for name, size in buffers.items()
            }
            plan.parts = [Part(self._made("decode", layer, use_cuda_graph=True, **made), None)]
            plan.own = True
        pages = _pages(list(range(len(batch.kv_lens_host))), batch, block_size)
        self._plan_decodes(plan.parts[0].wrapper, pages, layer, block_size)

    def _made(self, kind: str, layer: LayerSpec, **options: Any) -> Any:
        """A wrapper. Decodes of heads that share keys go to the tensor cores: the other kernel has a list of ratios."""
        if kind == "prefill":
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", **options)
        shared = layer.num_heads > layer.num_kv_heads or self._kept != self._dtype
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper
        return wrapper(self._workspace, "NHD", use_tensor_cores=shared, **options)

    def _plan_decodes(self, wrapper: Any, pages: Pages, layer: LayerSpec, block_size: int) -> None:
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        wrapper.plan(*pages, *heads, block_size, **self._options(layer))

    def _plan_prefills(
        self, wrapper: Any, queries: Sequence[int], pages: Pages, layer: LayerSpec, block_size: int
    ) -> None:
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        query_start = torch.from_numpy(np.cumsum((0, *queries), dtype=np.int32))
        wrapper.plan(query_start, *pages, *heads, block_size, causal=True, **self._options(layer))

    def _options(self, layer: LayerSpec) -> dict[str, Any]:
        found: dict[str, Any] = {
            "sm_scale": layer.scale,
            "window_left": -1 if layer.window is None else layer.window - 1,  # the query itself is not counted
            "logits_soft_cap": layer.softcap or 0.0,
            "q_data_type": self._dtype,
            "kv_data_type": self._kept,
        }
        return found if self._kept == self._dtype else found | {SCALES: True}

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, plan: Plan, sinks: Tensor | None) -> Tensor:
        keys, values, *scales = cache
        for new, codes, scale in zip((k, v), (keys, values), scales or (None, None), strict=True):
            if scale is None:
                codes.flatten(0, 1).index_copy_(0, plan.slots, new)
            else:
                packed, found = encode(new, codes.dtype)
                as_bytes(codes).flatten(0, 1).index_copy_(0, plan.slots, as_bytes(packed))
                scale.flatten(0, 1).index_copy_(0, plan.slots, found)
        given = {"kv_cache_sf": tuple(scales)} if scales else {}
        if len(plan.parts) == 1 and plan.parts[0].rows is None:
            return _attend(plan.parts[0].wrapper, q, (keys, values), sinks, given)
        out = torch.empty_like(q)
        for part in plan.parts:
            out[part.rows] = _attend(part.wrapper, q[part.rows], (keys, values), sinks, given)
        return out


def _attend(
    wrapper: Any, q: Tensor, cache: tuple[Tensor, Tensor], sinks: Tensor | None, scales: dict[str, Any]
) -> Tensor:
    if sinks is None:
        out: Tensor = wrapper.run(q, cache, **scales)
        return out
    out, lse = wrapper.run(q, cache, return_lse=True, **scales)  # lse: log2, float32 [T, heads]
    share = torch.sigmoid(lse * math.log(2) - sinks.float())  # of each softmax, that is not the sink's
    return (out * share[..., None]).to(q.dtype)


def _pages(requests: list[int], batch: Batch, block_size: int) -> Pages:
    """Of host lengths alone, but for the blocks themselves, which stay on the device."""
    lens = np.array([batch.kv_lens_host[b] for b in requests])
    counts = -(-lens // block_size)
    indptr = np.cumsum((0, *counts))
    at = np.arange(indptr[-1]) - np.repeat(indptr[:-1], counts)
    index: tuple[Ints, Ints] = np.repeat(requests, counts), at
    row, column = (torch.from_numpy(x).to(batch.block_table.device) for x in index)
    last = np.where(counts > 0, lens - (counts - 1) * block_size, 0)
    first, ends = (torch.from_numpy(x.astype(np.int32)) for x in (indptr, last))
    return Pages(first, batch.block_table[row, column], ends)


def _named() -> str:
    for package in ("flashinfer-python", "flashinfer"):
        try:
            return f"FlashInfer {version(package)}"
        except PackageNotFoundError:
            continue
    return "FlashInfer"


def _takes_scales() -> bool | None:
    """Whether the installed version knows scales of each token and head, found without importing it; None: none is there."""
    if (loaded := sys.modules.get("flashinfer")) is not None:
        return SCALES in inspect.signature(loaded.BatchPrefillWithPagedKVCacheWrapper.plan).parameters
    spec = importlib.util.find_spec("flashinfer")
    if spec is None:
        return None
    sources = [Path(place) / "prefill.py" for place in spec.submodule_search_locations or ()]
    return any(SCALES in source.read_text() for source in sources if source.is_file())
