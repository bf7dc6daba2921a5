"""FlashInfer's wrappers for paged keys, as flashinfer/prefill.py and flashinfer/decode.py of 0.7.4 document and check them.

Kept from the sources, since adapters trip over them: `run` before `plan` fails; the log of a softmax's sum has base 2; the
kernels behind `auto` take `sinks` and drop them; the keys of a request are counted from its pages and the last one's
length; with use_cuda_graph what is planned is copied into the buffers given at the start, whose sizes never change; an fp8
cache without scales is read as it is.
"""

from __future__ import annotations

import math
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor

from emulated.reference import attend, gathered

HALVES = (torch.float16, torch.bfloat16)
RATIOS = (1, 2, 3, 4, 6, 8, 16)  # of heads to key heads, in the decode kernel without tensor cores
MIB = 1 << 20


class _Paged:
    """What both wrappers do."""

    def _start(self, workspace: Tensor, layout: str) -> None:
        if workspace.dtype != torch.uint8 or workspace.numel() < MIB:
            raise ValueError("float_workspace_buffer must be uint8, 128 MB are recommended")
        if layout != "NHD":
            raise ValueError("only NHD is emulated")
        self.device, self._planned = workspace.device, False

    def _keep(self, query_start: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, **options: Any) -> None:
        for x in (query_start, indptr, indices, last):
            if x.dtype != torch.int32 or x.dim() != 1:
                raise ValueError("the planner reads int32 vectors")
        if not len(query_start) == len(indptr) == len(last) + 1:
            raise ValueError("indptr is [batch_size + 1], last_page_len [batch_size]")
        if len(indices) < int(indptr[-1]):
            raise ValueError("indices is [indptr[-1]]")
        if options["num_qo_heads"] % options["num_kv_heads"]:
            raise ValueError("num_qo_heads must be a multiple of num_kv_heads")
        q, kv = (_dtype(options[name]) for name in ("q_data_type", "kv_data_type"))
        options["q_data_type"], options["kv_data_type"] = q, q if kv is None else kv
        if q not in HALVES:
            raise ValueError(f"there is no kernel for queries of {q}")
        if options["use_token_head_sf"] and options["kv_data_type"] != torch.float8_e4m3fn:
            raise ValueError("use_token_head_sf requires an fp8 (e4m3/e5m2) KV cache")
        self._query_start, self._indptr, self._indices, self._last = query_start, indptr, indices, last
        self._options, self._planned = options, True

    def _run(
        self, q: Tensor, cache: tuple[Tensor, Tensor], causal: bool, scales: Any, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        if not self._planned:
            raise RuntimeError("plan info is not initialized")
        asked = self._options
        heads, kv_heads, dim = asked["num_qo_heads"], asked["num_kv_heads"], asked["head_dim"]
        if q.shape != (int(self._query_start[-1]), heads, dim):
            raise ValueError(f"q is {tuple(q.shape)}, planned for [{int(self._query_start[-1])}, {heads}, {dim}]")
        for side in cache:
            if side.dtype != asked["kv_data_type"] or q.dtype != asked["q_data_type"]:
                raise ValueError("The dtype of q or k does not match what was specified in plan")
            if side.shape[1:] != (asked["page_size"], kv_heads, dim):
                raise ValueError(f"a cache of {tuple(side.shape)}, planned for pages of {asked['page_size']}")
        if asked["use_token_head_sf"] and (
            scales is None or any(s.dtype != torch.float32 or s.shape != cache[0].shape[:3] for s in scales)
        ):
            raise ValueError("kv_cache_sf must be two float32 tensors [num_pages, page_size, num_kv_heads]")
        scale = dim**-0.5 if asked["sm_scale"] is None else asked["sm_scale"]
        out, lse = torch.zeros(q.shape), torch.zeros(q.shape[:2])
        for b in range(len(self._last)):
            pages = self._indices[int(self._indptr[b]) : int(self._indptr[b + 1])]
            num = max(len(pages) - 1, 0) * asked["page_size"] + (int(self._last[b]) if len(pages) else 0)
            rows = slice(int(self._query_start[b]), int(self._query_start[b + 1]))
            k, v = (gathered(side, pages, num).float() for side in cache)
            if asked["use_token_head_sf"]:
                k, v = (x * gathered(s, pages, num)[..., None] for x, s in zip((k, v), scales, strict=True))
            window = (asked["window_left"], None)
            out[rows], lse[rows] = attend(q[rows], k, v, scale, causal, window, asked["logits_soft_cap"] or 0.0)
        out = out.to(q.dtype)
        return (out, lse / math.log(2)) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        if use_cuda_graph:
            raise ValueError("prefills under CUDA graphs are not emulated")
        self._start(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        self._causal = causal
        self._keep(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            use_token_head_sf=use_token_head_sf,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        assert isinstance(paged_kv_cache, tuple)
        return self._run(q, paged_kv_cache, self._causal if self._planned else False, kv_cache_sf, return_lse)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._start(float_workspace_buffer, kv_layout)
        self._tensor_cores = use_tensor_cores
        given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._buffers = [x for x in given if x is not None] if use_cuda_graph else None
        if self._buffers is not None and len(self._buffers) < 3:
            raise ValueError("all three buffers should be tensors in cudagraph mode")

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        if deprecated_positional_args:
            raise DeprecationWarning("options of plan are passed by keyword")
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        if not self._tensor_cores and num_qo_heads // num_kv_heads not in RATIOS:
            raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
        if self._buffers is not None:
            if len(last_page_len) != len(self._buffers[2]):
                raise ValueError("The batch size should be fixed in cudagraph mode")
            if len(indices) > len(self._buffers[1]):
                raise ValueError("The size of indices should be less than or equal to the allocated buffer")
            for buffer, new in zip(self._buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(new)].copy_(new)
            indptr, indices, last_page_len = self._buffers
        self._keep(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            use_token_head_sf=use_token_head_sf,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        assert isinstance(paged_kv_cache, tuple)
        return self._run(q, paged_kv_cache, True, kv_cache_sf, return_lse)


def _dtype(named: str | torch.dtype | None) -> torch.dtype | None:
    return getattr(torch, named) if isinstance(named, str) else named


def flashinfer() -> types.ModuleType:
    """The module `flashinfer`."""
    module = types.ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    for each in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        setattr(module, each.__name__, each)
    return module
