"""What lies between a model's matrix products, each in one Triton kernel: RMSNorm, rotary embedding, SiLU and multiply.

Each computes in float32 and rounds once. Importing this imports triton. It knows no model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnout.kernels.triton import interpreted, launching_on, power_of_two
from turnout.kernels.triton.codes import narrow

TILE = 1024  # elements one program of `silu_mul` makes


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus: float = 0.0, residual: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + plus) over the last dimension, in x's dtype (arXiv 1910.07467; Gemma stores
    the weight less one: plus=1).

    x: [..., dim], contiguous. With `residual`, of x's shape and dtype, x is first added to it, in place, and the sum
    is normalized.
    """
    x, dim = x.contiguous(), x.shape[-1]
    out, rows = torch.empty_like(x), x.numel() // dim
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(
            f"the residual must be contiguous and of the shape {list(x.shape)}, got {list(residual.shape)}"
        )
    block = power_of_two(dim)
    with launching_on(x.device):
        _rms_norm[(rows,)](
            x, weight, residual, out, eps, plus,
            DIM=dim, BLOCK=block, ADD=residual is not None, INTERPRETED=interpreted(_rms_norm),
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of halves (arXiv 2104.09864, laid out as GPT-NeoX and Llama do): of the first `size` elements,
    i is paired with i + size / 2; those after them pass.

    q: [T, heads, dim]; k: [T, kv_heads, dim]; cos, sin: [T, size], their halves alike, as transformers makes them.
    """
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    dim, half = q.shape[2], cos.shape[1] // 2
    made = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    with launching_on(q.device):
        _rotate[(len(q),)](
            q, k, cos, sin, *made, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
            HEADS=q.shape[1], KV_HEADS=k.shape[1], HEADS_PAD=power_of_two(q.shape[1]), KV_PAD=power_of_two(k.shape[1]),
            DIM=dim, HALF=half, HALF_PAD=power_of_two(half), REST=dim - 2 * half,
            REST_PAD=power_of_two(max(dim - 2 * half, 1)), INTERPRETED=interpreted(_rotate), num_warps=4,
        )  # fmt: skip
    return made[0], made[1]


def silu_mul(both: Tensor) -> Tensor:
    """silu(gate) * up, gate and up the halves of the last dimension: [..., 2 * dim] to [..., dim]."""
    both, dim = both.contiguous(), both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], dim)
    with launching_on(both.device):
        _silu_mul[(both.numel() // (2 * dim), -(-dim // TILE))](
            both, out, DIM=dim, BLOCK=TILE, INTERPRETED=interpreted(_silu_mul), num_warps=4
        )
    return out


@triton.jit
def _rms_norm(x, weight, residual, out, eps, plus,
              DIM: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BLOCK)
    here, row = at < DIM, tl.program_id(0).to(tl.int64) * DIM
    values = tl.load(x + row + at, mask=here, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row + at, mask=here, other=0.0).to(tl.float32)
        summed = narrow(values, residual.dtype.element_ty, INTERPRETED)
        tl.store(residual + row + at, summed, mask=here)
        values = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / DIM + eps)
    gain = tl.load(weight + at, mask=here, other=0.0).to(tl.float32) + plus
    tl.store(out + row + at, narrow(values * scale * gain, out.dtype.element_ty, INTERPRETED), mask=here)


@triton.jit
def _rotate_heads(x, out, token, stride_t, stride_h, cos, sin, COUNT: tl.constexpr, PAD: tl.constexpr,
                  DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr,
                  REST_PAD: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    head, at = tl.arange(0, PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    source, target = x + token * stride_t + head * stride_h, out + (token * COUNT + head) * DIM
    here = (head < COUNT) & (at < HALF)
    first = tl.load(source + at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at, mask=here, other=0.0).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(target + at, narrow(first * cos - second * sin, kind, INTERPRETED), mask=here)
    tl.store(target + HALF + at, narrow(second * cos + first * sin, kind, INTERPRETED), mask=here)
    if REST:
        at = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        here = (head < COUNT) & (at < DIM)
        tl.store(target + at, tl.load(source + at, mask=here, other=0.0), mask=here)


@triton.jit
def _rotate(q, k, cos, sin, q_out, k_out, stride_qt, stride_qh, stride_kt, stride_kh, stride_cos, stride_sin,
            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, KV_PAD: tl.constexpr,
            DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr,
            REST_PAD: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, HALF_PAD)
    c = tl.load(cos + token * stride_cos + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * stride_sin + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(q, q_out, token, stride_qt, stride_qh, c, s, HEADS, HEADS_PAD, DIM, HALF, HALF_PAD, REST, REST_PAD,
                  INTERPRETED)  # fmt: skip
    _rotate_heads(k, k_out, token, stride_kt, stride_kh, c, s, KV_HEADS, KV_PAD, DIM, HALF, HALF_PAD, REST, REST_PAD,
                  INTERPRETED)  # fmt: skip


@triton.jit
def _silu_mul(both, out, DIM: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < DIM
    gate = tl.load(both + row * 2 * DIM + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * DIM + DIM + at, mask=here, other=0.0).to(tl.float32)
    power = tl.exp(-tl.abs(gate))  # at most 1: it can't overflow
    share = tl.where(gate < 0, power, 1.0) / (1.0 + power)
    tl.store(out + row * DIM + at, narrow(gate * share * up, out.dtype.element_ty, INTERPRETED), mask=here)
