"""Kernels that apply the functions of `turnout.kernels.triton.codes` to a tensor. Importing this imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnout.kernels.triton.codes import from_fp8, to_fp8

BLOCK = 1 << 16


@triton.jit
def _apply(x, out, num, ENCODE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < num, other=0)
    tl.store(out + at, to_fp8(values) if ENCODE else from_fp8(values), mask=at < num)


def run(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """name: "to_fp8" or "from_fp8"; x: at most BLOCK numbers."""
    assert len(x) <= BLOCK
    out = torch.empty(len(x), dtype=dtype)
    _apply[(1,)](x, out, len(x), ENCODE=name == "to_fp8", BLOCK=BLOCK)
    return out
