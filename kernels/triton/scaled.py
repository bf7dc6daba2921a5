"""Products of 8-bit codes with 8-bit codes in Triton: int8 or float8_e4m3fn weights, activations rounded on the way.

    out[t, o] = sum over blocks b of x_scales[t, b] * scales[o, b] * sum over i in b of x_codes[t, i] * codes[o, i]

A block is a whole row (LLM.int8()'s vector-wise scales, arXiv 2208.07339), or some inputs of it: DeepSeek-V3's 128
(arXiv 2412.19437). int8 is summed exactly in int32, float8 in float32. GPUs without float8 units get the same codes
widened to float16, which holds them exactly. It knows no checkpoint format. Importing this imports triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnout.kernels.numbers import LEAST
from turnout.kernels.triton import has_fp8, interpreted, launching_on, power_of_two
from turnout.kernels.triton.codes import from_fp8, narrow, round_to_even, to_fp8

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
MOST_ROWS = 128  # of activations in a tile


class Codes(NamedTuple):
    """Activations in 8 bits. A block with NaN or infinity has NaN for its scale, so that what it reaches is NaN."""

    codes: Tensor  # int8 or float8_e4m3fn [T, in]
    scales: Tensor  # float32 [T, blocks]


def encode(x: Tensor, dtype: torch.dtype, block: int | None = None) -> Codes:
    """x: floats [T, in]. One scale for each `block` inputs of a token, the last block perhaps shorter; None: for all."""
    x, (rows, ins) = x.contiguous(), x.shape
    block = min(block or ins, ins)
    codes = torch.empty(rows, ins, dtype=torch.int8 if dtype == torch.int8 else torch.uint8, device=x.device)
    scales = torch.empty(rows, -(-ins // block), device=x.device)
    with launching_on(x.device):
        _encode[(rows, scales.shape[1])](
            x, codes, scales, INS=ins, BLOCK=block, PAD=power_of_two(block), FLOAT8=dtype != torch.int8, LEAST=LEAST,
            num_warps=min(16, max(1, power_of_two(block) // 512)),
        )  # fmt: skip
    return Codes(codes if dtype == torch.int8 else codes.view(dtype), scales)


def product(x: Codes, codes: Tensor, scales: Tensor, block: int | None, dtype: torch.dtype) -> Tensor:
    """[T, out] of a float dtype. codes: [out, in], contiguous, of the dtype of x's codes; scales: float32 [out, blocks],
    contiguous; `block` as in `encode`, and a multiple of 32 or all inputs."""
    rows, (outs, ins) = len(x.codes), codes.shape
    if x.codes.dtype != codes.dtype or x.scales.shape[1] != scales.shape[1]:
        raise ValueError(
            f"{x.codes.dtype} in {x.scales.shape[1]} blocks can't be multiplied by {codes.dtype} in {scales.shape[1]}"
        )
    out = torch.empty(rows, outs, dtype=dtype, device=codes.device)
    if rows == 0:
        return out
    blocked, block = scales.shape[1] > 1, block or ins
    if blocked and block % 32:
        raise ValueError(f"blocks must be multiples of 32 inputs, got {block}")
    inner = block & -block if blocked else 128  # the largest power of two that divides a block
    tile_rows, tile_outs = min(power_of_two(rows, 16), MOST_ROWS), 32 if rows <= 16 else 64
    kind = "int8" if codes.dtype == torch.int8 else "fp8"
    if kind == "fp8" and has_fp8(codes.device) and not interpreted(_product):
        kind = "fp8_native"
    raw = [t if kind == "int8" else t.view(torch.uint8) for t in (x.codes, codes)]
    with launching_on(codes.device):
        _product[(-(-outs // tile_outs), -(-rows // tile_rows))](
            *raw, x.scales, scales, out, rows, outs, INS=ins, BLOCK=block if blocked else ins, BLOCKED=blocked,
            TILE_ROWS=tile_rows, TILE_OUTS=tile_outs, INNER=min(inner, 128), KIND=kind,
            INTERPRETED=interpreted(_product), num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit
def _encode(
    x, codes, scales,
    INS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr, FLOAT8: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, PAD)
    at = block * BLOCK + within
    here = (within < BLOCK) & (at < INS)
    values = tl.load(x + row * INS + at, mask=here, other=0.0).to(tl.float32)
    spoiled = tl.sum(values * 0.0, 0)  # NaN where a value is NaN or infinite
    top = tl.max(tl.abs(values), 0)
    largest: tl.constexpr = 448.0 if FLOAT8 else 127.0
    scale = tl.maximum(top, LEAST) / largest
    sound = (spoiled == 0.0) & (top >= LEAST)
    scaled = tl.where(sound, values / tl.where(sound, scale, 1.0), 0.0)
    kept = to_fp8(tl.minimum(tl.maximum(scaled, -448.0), 448.0)) if FLOAT8 else round_to_even(scaled).to(tl.int8)
    tl.store(codes + row * INS + at, kept, mask=here)
    tl.store(scales + row * ((INS + BLOCK - 1) // BLOCK) + block, scale + spoiled)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, codes, x_scales, scales, out, rows, outs,
    INS: tl.constexpr, BLOCK: tl.constexpr, BLOCKED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUTS: tl.constexpr,
    INNER: tl.constexpr, KIND: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of outputs, tiles of rows). With BLOCKED each step of INNER inputs lies within one block."""
    BLOCKS: tl.constexpr = (INS + BLOCK - 1) // BLOCK
    output = tl.program_id(0) * TILE_OUTS + tl.arange(0, TILE_OUTS)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    there, asked = output < outs, row < rows
    weight_row, input_row = output.to(tl.int64) * INS, row.to(tl.int64) * INS
    total = tl.full([TILE_ROWS, TILE_OUTS], 0, tl.int32 if KIND == "int8" and not BLOCKED else tl.float32)
    for start in range(0, INS, INNER):
        at = start + tl.arange(0, INNER)
        a = tl.load(x + input_row[:, None] + at[None, :], mask=asked[:, None] & (at < INS)[None, :], other=0)
        b = tl.load(codes + weight_row[None, :] + at[:, None], mask=(at < INS)[:, None] & there[None, :], other=0)
        if KIND == "int8":
            part = tl.dot(a, b, out_dtype=tl.int32)
        elif KIND == "fp8_native":
            part = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True), max_num_imprecise_acc=0)
        else:
            part = tl.dot(from_fp8(a), from_fp8(b))
        if BLOCKED:
            block = start // BLOCK
            x_scale = tl.load(x_scales + row * BLOCKS + block, mask=asked, other=0.0)
            scale = tl.load(scales + output * BLOCKS + block, mask=there, other=0.0)
            total += part.to(tl.float32) * (x_scale[:, None] * scale[None, :])
        else:
            total += part
    answer = total.to(tl.float32)
    if not BLOCKED:
        x_scale = tl.load(x_scales + row, mask=asked, other=0.0)
        scale = tl.load(scales + output, mask=there, other=0.0)
        answer *= x_scale[:, None] * scale[None, :]
    target = out + row.to(tl.int64)[:, None] * outs + output[None, :]
    tl.store(target, narrow(answer, out.dtype.element_ty, INTERPRETED), mask=asked[:, None] & there[None, :])
