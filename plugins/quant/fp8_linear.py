"""Linear layers of 8-bit floats (e4m3fn, arXiv 2209.05433): W[o, i] = scales[o, i // block] * codes[o, i].

Activations are rounded to 8-bit floats too, with scales as `Activations` says: what a GPU's matrix units multiply. A
device without them rounds the same way and multiplies in floats, so answers agree. Weights stay 8-bit in memory. It
knows no checkpoint format. "torch" widens some rows of the weights at a time and runs anywhere; "native" does so by our C++ on a CPU (fp8.cpp); "scaled_mm" is
`torch._scaled_mm`, on GPUs with 8-bit floats, for scales that cover whole rows; "triton" is ours (kernels/triton/scaled.py), on
any GPU, for blocks too.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.core import ModelError
from turnout.kernels import cpu as native
from turnout.kernels.numbers import LEAST

CODE = torch.float8_e4m3fn
LARGEST = 448.0  # of a code
SCRATCH = 1 << 18  # weights widened at once: 1 MiB, which stays in a core's cache
KERNELS = ("auto", "native", "scaled_mm", "torch", "triton")
OLDEST = (8, 9)  # compute capability with 8-bit floats


class Activations(enum.Enum):
    """What shares one scale among the activations."""

    FLOAT = "none is rounded"
    TOKEN = "a token"
    BLOCK = "a token's inputs under one scale of the weights"
    FIXED = "all: the checkpoint's scale"


def quantized(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes e4m3fn [out, in], scales float32 [out, 1]) of a float weight, each row's largest entry = 448."""
    exact = weight.to(torch.float32)
    top = exact.abs().amax(1, keepdim=True)
    if not torch.isfinite(top).all():
        raise ModelError(f"{name}.weight holds NaN or infinity, which no scale makes an 8-bit float of")
    scales = top.clamp_min(LEAST) / LARGEST
    return codes_of(exact / scales), scales


def codes_of(x: Tensor) -> Tensor:
    """The nearest codes; beyond the largest, the largest."""
    return x.clamp(-LARGEST, LARGEST).to(CODE)


def row_scales(scales: Tensor, rows_of_block: int, outs: int) -> Tensor:
    """float32 [out, blocks] of scales [ceil(out / rows_of_block), blocks]: each row gets those it lies under, so that
    parts of any size can be joined, and cut, without looking at block edges again."""
    return scales.to(torch.float32).repeat_interleave(rows_of_block, dim=0)[:outs].contiguous()


class Fp8Linear(nn.Module):
    """codes: e4m3fn [out, in]; scales: float32 [out, ceil(in / block)]; bias: [out] or None; fixed: float32 scalar, the
    scale of the activations where it is given. `kernel` says what multiplies."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    fixed: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        block: int,
        activations: Activations,
        bias: Tensor | None = None,
        fixed: Tensor | None = None,
        kernel: str = "torch",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.block, self.activations, self.kernel = min(block, self.in_features), activations, kernel
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scales", scales.to(torch.float32).contiguous())
        self.register_buffer("bias", bias)
        self.register_buffer("fixed", None if fixed is None else fixed.to(torch.float32).reshape(()))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, block={self.block}, kernel={self.kernel}"

    def rows(self, start: int, stop: int) -> Tensor:
        """The weights of some outputs, float32 [stop - start, in]."""
        if self.kernel == "native":
            return _widened(self, start, stop)
        wide = self.codes[start:stop].to(torch.float32)
        if self.scales.shape[1] == 1:
            return wide.mul_(self.scales[start:stop])
        scales = self.scales[start:stop].repeat_interleave(self.block, dim=1)
        return wide.mul_(scales[:, : self.in_features])

    def dequantize(self) -> Tensor:
        return self.rows(0, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).to(torch.float32)
        if self.kernel == "scaled_mm":
            out = _scaled_mm(self, flat)
        elif self.kernel == "triton":
            out = _triton(self, flat)
        else:
            out = _in_floats(self, rounded(flat, self))
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @classmethod
    def joined(cls, layers: Sequence[Self]) -> Self | None:
        """One layer whose outputs are those of all, side by side, each row keeping its scales."""
        first = layers[0]
        kinds = {
            (
                layer.in_features,
                layer.block,
                layer.activations,
                layer.kernel,
                None if layer.fixed is None else float(layer.fixed),
                layer.bias is None,
            )
            for layer in layers
        }
        if len(kinds) > 1:
            return None
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return cls(
            torch.cat([layer.codes.view(torch.uint8) for layer in layers]).view(CODE),
            torch.cat([layer.scales for layer in layers]),
            first.block,
            first.activations,
            torch.cat(biases) if biases else None,
            first.fixed,
            first.kernel,
        )


def pick(kernel: str, layer: Fp8Linear) -> str:
    """The kernel that `kernel` stands for on the layer's device. Raises ModelError where it can't compute the layer."""
    on_cpu = layer.codes.device.type == "cpu"
    obstacles = {
        "native": native.obstacle() if on_cpu else f"the model is on {layer.codes.device.type}, and it runs on a CPU",
        "scaled_mm": _no_scaled_mm(layer),
        "triton": _no_triton(layer),
        "torch": None,
    }
    if kernel == "auto":
        return next(name for name, why in obstacles.items() if why is None)
    if why := obstacles[kernel]:
        raise ModelError(f"quant.kernel={kernel} can't be had here: {why}; choose quant.kernel=torch")
    return kernel


def _no_scaled_mm(layer: Fp8Linear) -> str | None:
    device = layer.codes.device
    if device.type != "cuda":
        return f"torch multiplies 8-bit floats on a GPU, and the model is on {device.type}"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} has no units for 8-bit floats (compute capability 8.9 on)"
    if layer.scales.shape[1] > 1:
        return "its scales do not cover whole rows"
    if layer.in_features % 16 or layer.out_features % 16:
        return f"sizes must be multiples of 16, and it is {layer.in_features} to {layer.out_features}"
    if layer.activations is Activations.FLOAT:
        return "its activations stay floats"
    return None


def _no_triton(layer: Fp8Linear) -> str | None:
    if layer.codes.device.type != "cuda":
        return f"Triton's kernels run on a GPU, and the model is on {layer.codes.device.type}"
    if layer.activations in (Activations.FLOAT, Activations.FIXED):
        return f"it rounds activations by one scale for {layer.activations.value}"
    if layer.scales.shape[1] > 1 and layer.block % 32:
        return f"blocks must be multiples of 32 inputs, and they are {layer.block}"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def encoded(x: Tensor, layer: Fp8Linear) -> tuple[Tensor, Tensor]:
    """Activations float32 [T, in] as (codes in float32, scales [T, 1], or [T, in] where they differ within a row).

    A row with NaN or infinity gets NaN for its scale, so that its result is NaN, and only its own.
    """
    if layer.activations is Activations.BLOCK and layer.block < layer.in_features:
        padded = F.pad(x, (0, -layer.in_features % layer.block)).view(x.shape[0], -1, layer.block)
        top = padded.abs().amax(2).repeat_interleave(layer.block, dim=1)[:, : layer.in_features]
    else:
        top = x.abs().amax(1, keepdim=True)
    finite = torch.isfinite(top)
    scale = top.clamp_min(LEAST) / LARGEST if layer.fixed is None else layer.fixed.expand_as(top)
    codes = torch.where(finite, codes_of(x / scale).to(torch.float32), 0.0)
    return codes, torch.where(finite, scale, torch.nan)


def rounded(x: Tensor, layer: Fp8Linear) -> Tensor:
    """The activations [T, in] that the layer multiplies, float32."""
    if layer.activations is Activations.FLOAT:
        return x
    codes, scales = encoded(x, layer)
    return codes * scales


@functools.cache
def _widen() -> Callable[..., None]:
    found: Callable[..., None] = native.library().turnout_fp8_widen
    found.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4]  # type: ignore[attr-defined]
    found.restype = None  # type: ignore[attr-defined]
    return found


def _widened(layer: Fp8Linear, start: int, stop: int) -> Tensor:
    """`Fp8Linear.rows` by the native kernel."""
    out = torch.empty(stop - start, layer.in_features)
    codes, scales = layer.codes[start:stop], layer.scales[start:stop]
    _widen()(
        codes.data_ptr(), scales.data_ptr(), out.data_ptr(), stop - start, layer.in_features, layer.block,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def _in_floats(layer: Fp8Linear, x: Tensor) -> Tensor:
    """Some rows of the weights at a time, so the scratch is bounded whatever the layer."""
    out = x.new_empty(x.shape[0], layer.out_features)
    step = max(1, SCRATCH // layer.in_features)
    for start in range(0, layer.out_features, step):
        stop = min(start + step, layer.out_features)
        out[:, start:stop] = F.linear(x, layer.rows(start, stop))
    return out


def _triton(layer: Fp8Linear, x: Tensor) -> Tensor:
    from turnout.kernels.triton.scaled import encode, product

    block = layer.block if layer.scales.shape[1] > 1 else None
    return product(encode(x, CODE, block), layer.codes, layer.scales, block, torch.float32)


def _scaled_mm(layer: Fp8Linear, x: Tensor) -> Tensor:
    """Codes times codes on the matrix units, in float32; the scales afterwards, each row and output its own."""
    codes, scales = encoded(x, layer)
    one = torch.ones((), device=x.device)
    out = torch._scaled_mm(
        codes.to(CODE), layer.codes.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False
    )
    return out * (scales * layer.scales.t())
