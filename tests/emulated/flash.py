"""FlashAttention 2, 3 and 4, as their interfaces document them and their sources check them, for paged keys.

2: csrc/flash_attn/flash_api.cpp of 2.8.3; 3: hopper/flash_api.cpp; 4: flash_attn/cute/interface.py of 4.0.0b36.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emulated.reference import Window, attend, gathered

HALVES = (torch.float16, torch.bfloat16)
TILE = 64  # the smallest tile of keys that versions 3 and 4 load whole


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise RuntimeError(rule)


def _checked(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, start: Tensor, lens: Tensor) -> None:
    """What all versions insist on."""
    for x in (keys, values):
        _check(x.dtype == q.dtype and q.dtype in HALVES, "q, k and v must be fp16 or bf16, all the same")
        _check(x.dim() == 4 and x.stride(-1) == 1, "a paged cache is [num_pages, page_size, heads_k, dim]")
    _check(q.dim() == 3 and q.stride(-1) == 1, "q is [total_q, heads, dim]")
    _check(keys.shape[:3] == values.shape[:3] and keys.shape[-1] == q.shape[-1], "the cache's shapes do not fit q's")
    _check(q.shape[1] % keys.shape[2] == 0, "heads of q must be a multiple of those of k")
    _check(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "head dim must be a multiple of 8 and at most 256")
    _check(table.dtype == torch.int32 and table.dim() == 2 and table.stride(-1) == 1, "block table must be int32")
    for x, size in ((start, len(table) + 1), (lens, len(table))):
        _check(x.dtype == torch.int32 and x.shape == (size,) and x.is_contiguous(), f"lengths must be int32 [{size}]")


def _paged(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    table: Tensor,
    start: Tensor,
    lens: Tensor,
    max_queries: int,
    scale: float | None,
    causal: bool,
    window: Window,
    softcap: float,
    reads_tiles: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [total_q, heads, v_dim] in q's dtype and lse float32 [heads, total_q]. What nobody computes stays NaN."""
    keys, values = cache
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.full((q.shape[0], q.shape[1], values.shape[-1]), math.nan)
    lse = torch.full((q.shape[1], q.shape[0]), math.nan)
    for b, (first, end, num) in enumerate(zip(start[:-1].tolist(), start[1:].tolist(), lens.tolist(), strict=True)):
        k, v = (gathered(side, table[b], num) for side in cache)
        found, sums = attend(q[first:end], k, v, scale, causal, window, softcap)
        size = keys.shape[1]
        if reads_tiles and size % TILE == 0 and num % size:  # weights of 0 meet what lies behind the last key
            found = found + 0.0 * values[table[b, num // size].long(), num % size :].float().sum()
        rows = slice(first, min(end, first + max_queries))  # the grid covers no more
        out[rows], lse[:, rows] = found[:max_queries], sums[:max_queries].T
    return out.to(q.dtype), lse


def flash_attn_2() -> types.ModuleType:
    """The module `flash_attn.flash_attn_interface`."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Any:
        _check(block_table is not None, "only paged keys are emulated")
        assert block_table is not None
        _check(cu_seqlens_k.dtype == torch.int32 and len(cu_seqlens_k) == len(block_table) + 1, "cu_seqlens_k")
        lens = cu_seqlens_k.diff()
        _checked(q, k, v, block_table, cu_seqlens_q, lens)
        _check(k.shape == v.shape, "v must have the shape of k")
        _check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        left = -1 if window_size[0] >= max_seqlen_k else window_size[0]
        args = q, (k, v), block_table, cu_seqlens_q, lens, max_seqlen_q, softmax_scale, causal, (left, window_size[1])
        out, lse = _paged(*args, softcap)
        return (out, lse, None) if return_attn_probs else out

    return _module("flash_attn.flash_attn_interface", flash_attn_varlen_func)


def flash_attn_3() -> types.ModuleType:
    """The module `flash_attn_interface`."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | int | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        assert page_table is not None and cu_seqlens_q is not None and isinstance(cache_seqlens, Tensor)
        _check(k is None and v is None and qv is None, "only attention over what is cached is emulated")
        _check(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
        assert max_seqlen_q is not None
        _checked(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens)
        dim, v_dim = q.shape[-1], v_cache.shape[-1]
        fits = dim == v_dim or (128 < dim <= 192 and 96 < v_dim <= 128) or (dim <= 64 and v_dim <= 512)
        _check(fits and v_dim % 8 == 0, "V headdim is different from Q/K dim in a way that is not supported")
        args = q, (k_cache, v_cache), page_table, cu_seqlens_q, cache_seqlens, max_seqlen_q, softmax_scale, causal
        out, lse = _paged(*args, window_size, softcap, reads_tiles=True)
        return (out, lse) if return_softmax_lse else out

    return _module("flash_attn_interface", flash_attn_with_kvcache)


def flash_attn_4() -> types.ModuleType:
    """The module `flash_attn.cute`, on Hopper."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bwd: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        block_sparse_tensors: Any = None,
        aux_tensors: list[Tensor] | None = None,
        aux_scalars: tuple[Any, ...] | None = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> Any:
        _check(cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k")
        assert page_table is not None and cu_seqlens_q is not None and seqused_k is not None
        _check(num_splits == 1, "SplitKV not supported on SM 9.0")
        _checked(q, k, v, page_table, cu_seqlens_q, seqused_k)
        _check(
            q.shape[-1] % 16 == 0 and v.shape[-1] % 16 == 0, "cp.async of pages takes head dims that are padded to 16"
        )
        longest = q.shape[0] if max_seqlen_q is None else max_seqlen_q
        left, right = window_size[0], 0 if causal else window_size[1]
        window = (None, None) if left is not None and right is not None and left + right < 0 else window_size
        args = q, (k, v), page_table, cu_seqlens_q, seqused_k, longest, softmax_scale, causal, window, softcap
        out, lse = _paged(*args, reads_tiles=True)
        if learnable_sink is not None:
            _check(learnable_sink.shape == (q.shape[1],), "learnable_sink must be [heads]")
            joined = torch.logaddexp(lse, learnable_sink.float()[:, None])
            out = (out.float() * torch.exp(lse - joined).T[..., None]).to(q.dtype)
            lse = joined
        return out, (lse if return_lse else None)

    return _module("flash_attn.cute", flash_attn_varlen_func)


def _module(name: str, *functions: Callable[..., Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, function)
    return module
