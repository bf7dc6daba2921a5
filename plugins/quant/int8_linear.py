"""Linear layers of 8-bit integers: W[o, i] = scales[o] * codes[o, i], activations quantized one row at a time.

    out[t, o] = (sum over i of x_codes[t, i] * codes[o, i]) * x_scales[t] * scales[o] + bias[o]

The sum is exact in int32. "native" computes it in our C++ kernels on a CPU (kernels/cpu/int8.cpp), "triton" in ours
on a GPU (kernels/triton/scaled.py), "torch" by `torch._int_mm`: the reference, on any device. Neither knows a checkpoint format. The scales are those of LLM.int8()'s
vector-wise quantization (arXiv 2208.07339), with every column in 8 bits: none is kept apart as an outlier.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.core import ModelError
from turnout.kernels import cpu as native
from turnout.kernels.cpu.linear import NativeLinear
from turnout.kernels.numbers import LEAST

KERNELS = ("auto", "native", "torch", "triton")
MOST_INPUTS = 1 << 16  # beyond, 255 * 128 * inputs leaves int32
PANEL, STEP, OFFSET = 16, 64, 128  # of the native layout


def quantized(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 [out, in], scales float32 [out]) of a float weight [out, in], symmetric, largest entry = 127."""
    exact = weight.to(torch.float32)
    top = exact.abs().amax(1)
    if not torch.isfinite(top).all():
        raise ModelError(f"{name}.weight holds NaN or infinity, which no 8-bit integer can stand for")
    scales = top.clamp_min(LEAST) / 127
    return torch.round(exact / scales[:, None]).to(torch.int8), scales


def quantize_rows(x: Tensor, fixed: Tensor | None) -> tuple[Tensor, Tensor]:
    """(codes int8 [T, in], scales float32 [T]) of x float32 [T, in]. `fixed`: the one scale of all rows, given.

    A row with NaN or infinity has NaN for its scale and zeros for codes, so that its result is NaN, and only its own.
    """
    top = x.abs().amax(1)
    finite = torch.isfinite(top)
    scales = torch.where(finite, top / 127 if fixed is None else fixed, torch.nan)
    by = torch.full_like(top, 127) / top if fixed is None else (1 / fixed).expand_as(top)
    by = torch.where(finite & (top >= LEAST), by, 0.0)
    codes = torch.round((x * by[:, None]).clamp(-128, 127))
    return torch.where(by[:, None] == 0, 0.0, codes).to(torch.int8), scales


def make(
    name: str, codes: Tensor, scales: Tensor, bias: Tensor | None, fixed: Tensor | None, kernel: str
) -> TorchInt8 | NativeInt8:
    """The layer. codes: int8 [out, in]; scales: float32 [out]; fixed: float32 scalar, the activations' given scale.
    Raises ModelError where `kernel` can't compute it."""
    if codes.shape[1] > MOST_INPUTS:
        raise ModelError(f"{name} has {codes.shape[1]} inputs; int32 holds the sums of at most {MOST_INPUTS}")
    obstacles = {
        "native": native.obstacle() or (f"{name} is on {codes.device}" if codes.device.type != "cpu" else None),
        "triton": _no_triton(name, codes, fixed),
        "torch": None,
    }
    if kernel == "auto":
        kernel = next(one for one, why in obstacles.items() if why is None)
    if why := obstacles[kernel]:
        raise ModelError(f"quant.kernel={kernel} can't be had here: {why}; choose quant.kernel=torch")
    kinds: dict[str, type[TorchInt8 | NativeInt8]] = {"native": NativeInt8, "triton": TritonInt8}
    return kinds.get(kernel, TorchInt8)(codes, scales, bias, fixed)


def _no_triton(name: str, codes: Tensor, fixed: Tensor | None) -> str | None:
    if codes.device.type != "cuda":
        return f"{name} is on {codes.device}, and Triton's kernels run on a GPU"
    if fixed is not None:
        return f"{name} has a fixed scale for its activations"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


class TorchInt8(nn.Module):
    """The reference, in plain torch."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    fixed: Tensor | None

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, fixed: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scales", scales.float())
        self.register_buffer("bias", None if bias is None else bias.float())
        self.register_buffer("fixed", None if fixed is None else fixed.float().reshape(()))

    def dequantize(self) -> Tensor:
        return self.codes * self.scales[:, None]

    def forward(self, x: Tensor) -> Tensor:
        codes, scales = quantize_rows(x.reshape(-1, self.in_features).float(), self.fixed)
        out = _product(codes, self.codes) * (scales[:, None] * self.scales)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @classmethod
    def joined(cls, layers: Sequence[Self]) -> Self | None:
        """One layer whose outputs are those of all, side by side, each keeping its scales."""
        if not _alike(layers):
            return None
        codes, scales = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("codes", "scales"))
        return cls(codes, scales, _side_by_side(layers), layers[0].fixed)


class TritonInt8(TorchInt8):
    """The same on a GPU: rounding in one launch, product and scales in another."""

    def forward(self, x: Tensor) -> Tensor:
        from turnout.kernels.triton.scaled import encode, product

        rows = encode(x.reshape(-1, self.in_features), torch.int8)
        out = product(rows, self.codes, self.scales[:, None], None, x.dtype)
        if self.bias is not None:
            out += self.bias.to(out.dtype)
        return out.view(*x.shape[:-1], self.out_features)


class _Data(ctypes.Structure):
    """`struct Int8` of int8.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "bias", "fixed")),
        *((name, ctypes.c_int64) for name in ("ins", "outs")),
    ]


class NativeInt8(NativeLinear):
    """The same on a CPU in one native call; `packed` is the weight as int8.cpp reads it (`pack`)."""

    function = "turnout_int8"

    packed: Tensor
    scales: Tensor
    bias: Tensor | None
    fixed: Tensor | None

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, fixed: Tensor | None) -> None:
        super().__init__(codes.shape[1], codes.shape[0])
        self.register_buffer("packed", pack(codes))
        self.register_buffer("scales", scales.float().contiguous())
        self.register_buffer("bias", None if bias is None else bias.float().contiguous())
        self.register_buffer("fixed", None if fixed is None else fixed.float().reshape(()))
        self._describe()

    def _struct(self) -> ctypes.Structure:
        held = self.packed, self.scales, self.bias, self.fixed
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in held]
        return _Data(*pointers, self.in_features, self.out_features)

    @property
    def codes(self) -> Tensor:
        """int8 [out, in], laid out anew at every look."""
        return unpack(self.packed, self.out_features, self.in_features)

    def dequantize(self) -> Tensor:
        return self.codes * self.scales[:, None]

    @classmethod
    def joined(cls, layers: Sequence[Self]) -> Self | None:
        """One layer whose outputs are those of all, side by side, each keeping its scales."""
        if not _alike(layers):
            return None
        scales = torch.cat([layer.scales for layer in layers])
        return cls(torch.cat([layer.codes for layer in layers]), scales, _side_by_side(layers), layers[0].fixed)


def pack(codes: Tensor) -> Tensor:
    """int8 [out, in] -> uint8 [panels, in / 4, 16, 4]: code + 128, outputs filled up to whole 16s, inputs to 64s."""
    outs, ins = codes.shape
    filled = F.pad(codes, (0, -ins % STEP, 0, -outs % PANEL))
    panels = filled.view(filled.shape[0] // PANEL, PANEL, -1, 4).transpose(1, 2).contiguous()
    return panels.view(torch.uint8) ^ OFFSET


def unpack(packed: Tensor, outs: int, ins: int) -> Tensor:
    """The codes of `pack`."""
    panels = (packed ^ OFFSET).view(torch.int8).transpose(1, 2)
    return panels.reshape(packed.shape[0] * PANEL, -1)[:outs, :ins].contiguous()


def _product(x: Tensor, codes: Tensor) -> Tensor:
    """x int8 [T, in] times codes int8 [out, in]: float32 [T, out] of exact int32 sums.

    A GPU takes sizes in whole 8s and more than 16 rows; a CPU gives zeros for one input (torch 2.13). All are filled up.
    """
    rows, outs, ins = x.shape[0], codes.shape[0], x.shape[1]
    x = F.pad(x, (0, -ins % 8, 0, max(0, 17 - rows) if _on_gpu(x) else 0))
    codes = F.pad(codes, (0, -ins % 8, 0, -outs % 8))
    return torch._int_mm(x, codes.t())[:rows, :outs].float()


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _alike(layers: Sequence[TorchInt8] | Sequence[NativeInt8]) -> bool:
    first = layers[0]
    scales = {None if layer.fixed is None else float(layer.fixed) for layer in layers}
    biases = {layer.bias is None for layer in layers}
    return len(scales) == len(biases) == 1 and all(layer.in_features == first.in_features for layer in layers)


def _side_by_side(layers: Sequence[TorchInt8] | Sequence[NativeInt8]) -> Tensor | None:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None
