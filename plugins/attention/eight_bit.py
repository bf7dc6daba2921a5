"""Keys and values in 8 bits: codes, and one float32 scale for each token and head. It knows no backend.

    int8  scale = amax / 127, code = round(x / scale)
    fp8   scale = amax / 448, code = x / scale as float8_e4m3fn

A token's codes depend on that token alone, so a block may be shared, copied, swapped and written further at any time.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FORMS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # kv_cache_dtype -> dtype of the codes


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU NumPy's, whose pages take memory only when they are written: torch writes them at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: floats [T, kv_heads, dim]; codes of that shape and float32 scales [T, kv_heads]. NaN makes the scale NaN."""
    scales = x.abs().amax(-1).float() / LARGEST[dtype]
    y = x.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]  # a head of zeros: codes 0, scale 0
    return (y.round().to(dtype) if dtype == torch.int8 else y.to(dtype)), scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, up to rounding, in the float dtype asked for; scales without the last dimension of the codes."""
    wide = torch.promote_types(dtype, torch.float32)
    return (codes.to(wide) * scales[..., None].to(wide)).to(dtype)


def as_bytes(codes: Tensor) -> Tensor:
    """The same memory as uint8: torch can move those on every device."""
    return codes.view(torch.uint8)
