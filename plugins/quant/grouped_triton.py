"""What the GPU kernel of kernels/triton/grouped.py can compute of `Grouped` layers. It imports triton when it is asked."""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.plugins.quant.grouped import STORED, Grouped


def obstacle(layer: Grouped, dtype: torch.dtype) -> str | None:
    """Why this kernel can't compute the layer for inputs of `dtype`; None: it can. Raises ImportError without triton."""
    from turnout.kernels.triton import grouped as kernel

    if not kernel.runs_on(layer.codes.device):
        return f"it runs on a GPU, the layer is on {layer.codes.device}"
    if dtype not in kernel.DTYPES:
        return f"it computes in float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if layer.group % (8 // STORED[layer.bits]):
        return f"the codes of a byte share a group, and the layer's groups are of {layer.group}"
    return None


def select(layer: Grouped, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """`Grouped.select` of a layer this kernel has arranged: it arranges none."""
    raise AssertionError("the Triton kernel reads a layer's numbers as they are kept")


def product(layer: Grouped, x: Tensor) -> Tensor:
    """x: contiguous [T, in], already in the layer's order; returns [T, out] in x's dtype, the bias left out."""
    from turnout.kernels.triton import grouped as kernel

    return kernel.product(x, layer.codes, layer.scales, layer.offsets, layer.group, STORED[layer.bits])
