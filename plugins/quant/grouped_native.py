"""The CPU kernel of `Grouped` layers: their codes laid out for integer dot products, in place, when first needed.

It knows no checkpoint format. Inputs are rounded to int8 in blocks of 32 (16 where the groups ask for it), the idea of
llama.cpp's Q8 blocks, or stay float32: `activations` of the layer says which.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from turnout.kernels import cpu as native
from turnout.kernels.cpu import pages
from turnout.kernels.cpu.linear import FLOATS
from turnout.plugins.quant.grouped import Grouped, unpack

PANEL, CHUNK = 16, 16  # outputs side by side; inputs laid out together: `PANEL` and `CHUNK` of grouped.cpp
SPLIT = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}  # bits -> those kept low and those above


class _Data(ctypes.Structure):
    """`struct Grouped` of grouped.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("low", "high", "scales", "offsets", "bias", "order")),
        *((name, ctypes.c_int64) for name in ("ins", "outs", "group", "bits", "zero")),
        *((name, ctypes.c_int64) for name in ("half_scales", "half_offsets", "exact")),
    ]


class Arranged(NamedTuple):
    """How a layer's numbers lie that the kernel has laid out in the layer's own buffers, and where.

    codes: uint8 [panels, in / 16 * low bits / 2, 64]; above: uint8 [panels, .., 64], the bits over these, if any;
    scales, offsets: [panels, groups, 16].
    """

    zero: int | None  # offsets are -zero * scales and not kept; None: they are kept
    data: _Data  # without bias and order, which `Grouped.forward` sees to
    whole: _Data  # with them


def obstacle(layer: Grouped, dtype: torch.dtype) -> str | None:
    """Why this kernel can't compute the layer for inputs of `dtype`; None: it can."""
    if layer.scales.device.type != "cpu":
        return f"it runs on the CPU, the layer is on {layer.scales.device}"
    if dtype not in FLOATS:
        return f"it computes for float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if layer.bits not in SPLIT:
        return f"it has no layout for {layer.bits} bits"
    if layer.group % CHUNK:
        return f"its groups are multiples of {CHUNK} inputs, the layer's are of {layer.group}"
    return native.obstacle()


def product(layer: Grouped, x: Tensor) -> Tensor:
    """x: contiguous [T, in], already in the layer's order; returns [T, out] in x's type, the bias left out."""
    wide, out = x.float(), torch.empty(x.shape[0], layer.out_features)
    data = ctypes.addressof(arranged(layer).data)
    native.check(_library().turnout_grouped(data, wide.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads()))
    return out.to(x.dtype)


def native_product(layer: Grouped) -> tuple[int, int]:
    """The layer, bias and order included, as other kernels call it: (run, data)."""
    run = ctypes.cast(_library().turnout_grouped, ctypes.c_void_p).value
    assert run is not None
    return run, ctypes.addressof(arranged(layer).whole)


def arranged(layer: Grouped) -> Arranged:
    """How the layer's numbers lie; laid out now if they are not."""
    if not isinstance(layer.arranged, Arranged):
        layer.arranged = _arrange(layer)
    return layer.arranged


@functools.cache
def _library() -> ctypes.CDLL:
    library = native.library()
    library.turnout_grouped.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2]
    return library


def _arrange(layer: Grouped) -> Arranged:
    low_bits, high_bits = SPLIT[layer.bits]
    codes = _steps(unpack(layer.codes, layer.bits))
    layer.codes = pages.settled(_planes(codes & ((1 << low_bits) - 1) if high_bits else codes, low_bits))
    layer.register_buffer("above", pages.settled(_planes(codes >> low_bits, high_bits)) if high_bits else None)
    zero = _zero(layer)
    layer.scales = _panels(layer.scales)
    layer.offsets = _panels(layer.offsets) if zero is None else layer.offsets.new_empty(0)
    layer.bias = None if layer.bias is None else layer.bias.float().contiguous()
    numbers = [layer.in_features, layer.out_features, layer.group, layer.bits, zero or 0]
    kinds = [t.dtype == torch.float16 for t in (layer.scales, layer.offsets)]
    offsets = layer.offsets if zero is None else None
    pointers = [_pointer(t) for t in (layer.codes, layer._buffers["above"], layer.scales, offsets)]
    exact = layer.activations == "float"
    data = _Data(*pointers, None, None, *numbers, *kinds, exact)
    whole = _Data(*pointers, _pointer(layer.bias), _pointer(layer.order), *numbers, *kinds, exact)
    return Arranged(zero, data, whole)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _zero(layer: Grouped) -> int | None:
    """The code that stands for 0 in every group, where there is one."""
    scales, offsets = layer.scales.float(), layer.offsets.float()
    some = scales != 0
    if not bool(some.any()):
        return None
    zero = round(float(-offsets[some][0] / scales[some][0]))
    return zero if 0 <= zero < 1 << layer.bits and torch.equal(offsets, -zero * scales) else None


def _panels(values: Tensor) -> Tensor:
    """[out, groups] -> [panels, groups, 16], the last panel filled up with zeros."""
    short = -len(values) % PANEL
    full = torch.cat([values, values.new_zeros(short, values.shape[1])]) if short else values
    return pages.settled(full.view(-1, PANEL, values.shape[1]).transpose(1, 2))


def _steps(codes: Tensor) -> Tensor:
    """[out, in] -> [panels, in / 4, 64]: four inputs of each of a panel's outputs are a step of the dot product."""
    short = -len(codes) % PANEL
    full = torch.cat([codes, codes.new_zeros(short, codes.shape[1])]) if short else codes
    return full.view(-1, PANEL, codes.shape[1] // 4, 4).transpose(1, 2).reshape(-1, codes.shape[1] // 4, 4 * PANEL)


def _planes(steps: Tensor, bits: int) -> Tensor:
    """[panels, steps, 64], each below 2**bits -> [panels, ceil(steps * bits / 8), 64]: neighbours share their bytes."""
    per = 8 // bits
    short = -steps.shape[1] % per
    if short:
        steps = torch.cat([steps, steps.new_zeros(len(steps), short, steps.shape[2])], dim=1)
    parts = steps.view(len(steps), -1, per, steps.shape[2])
    packed = parts[:, :, 0].clone()
    for place in range(1, per):
        packed |= parts[:, :, place] << (place * bits)
    return packed


def select(layer: Grouped, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights of some outputs of an arranged layer, int64 [N] -> [N, in]."""
    zero = arranged(layer).zero
    low_bits, high_bits = SPLIT[layer.bits]
    codes = _codes(layer.codes, low_bits, ids, layer.in_features)
    if high_bits:
        codes |= _codes(layer.get_buffer("above"), high_bits, ids, layer.in_features) << low_bits
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = layer.scales[ids // PANEL, :, ids % PANEL].to(wide)
    offsets = layer.offsets[ids // PANEL, :, ids % PANEL].to(wide) if zero is None else -zero * scales
    weights = codes.view(len(ids), -1, layer.group).to(wide).mul_(scales[..., None]).add_(offsets[..., None])
    return weights.flatten(1).to(dtype)


def _codes(planes: Tensor, bits: int, ids: Tensor, ins: int) -> Tensor:
    """uint8 [N, in]: what `_planes` was given for these outputs."""
    size = (1 << bits) - 1
    packed = planes.view(len(planes), -1, PANEL, 4)[ids // PANEL, :, ids % PANEL]  # [N, packed steps, 4]
    parts = [(packed >> (place * bits)) & size for place in range(8 // bits)]
    return torch.stack(parts, dim=2).reshape(len(ids), -1)[:, :ins].contiguous()
