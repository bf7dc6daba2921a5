"""A linear layer whose weights are small integers with a scale and an offset for each group of inputs.

    W[o, i] = scales[o, i // group] * code[o, i] + offsets[o, i // group]

GPTQ, AWQ, compressed-tensors' packed layouts and the quants of GGUF all become this, so they share their kernels. It
knows no checkpoint format and no engine. What multiplies is a kernel: "torch", here, runs on every device and is what
the others are tested against; the others live in modules of their own (`KERNELS`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STORED = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}  # bits of a code -> bits it takes in memory: 3 as 4, 5 and 6 as 8
SCRATCH = 1 << 22  # weights the torch kernel unpacks at once: 16 MiB in float32
KERNELS = {  # name -> the module that has it; each knows by itself what it can't do
    "native": "turnout.plugins.quant.grouped_native",
    "triton": "turnout.plugins.quant.grouped_triton",
}
AUTO = {"cpu": ("native",), "cuda": ("triton",)}  # device type -> the kernels `auto` tries before torch


class Kernel(Protocol):
    """What a module in `KERNELS` has."""

    def obstacle(self, layer: Grouped, dtype: torch.dtype) -> str | None:
        """Why it can't compute this layer for inputs of `dtype` on the layer's device; None: it can."""
        ...

    def product(self, layer: Grouped, x: Tensor) -> Tensor:
        """x: contiguous [T, in], already in the layer's order; returns [T, out] in x's dtype, the bias left out."""
        ...

    def select(self, layer: Grouped, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """`Grouped.select` of a layer whose numbers this kernel has arranged."""
        ...


class NativeKernel(Kernel, Protocol):
    """What "native" has besides."""

    def native_product(self, layer: Grouped) -> tuple[int, int]:
        """(run, data): the layer, bias and order included, as other kernels call it."""
        ...


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., n], each below 2**bits, as uint8 [..., n * STORED[bits] / 8]: the first code in the lowest bits.

    4 bits: byte j holds code 2j in its low and 2j + 1 in its high nibble. 2 bits: byte j holds codes 4j to 4j + 3.
    """
    per = 8 // STORED[bits]
    if codes.shape[-1] % per:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes: {per} lie in one")
    parts = codes.to(torch.uint8).view(*codes.shape[:-1], -1, per)
    packed = parts[..., 0].clone()
    for place in range(1, per):
        packed |= parts[..., place] << (place * STORED[bits])
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes of `pack`, uint8."""
    size = STORED[bits]
    if size == 8:
        return packed
    parts = [(packed >> (place * size)) & ((1 << size) - 1) for place in range(8 // size)]
    return torch.stack(parts, dim=-1).flatten(-2)


def narrowed(values: Tensor) -> Tensor:
    """float16 where that holds every one of the values exactly, else float32."""
    exact = values.to(torch.float32)
    half = exact.to(torch.float16)
    return half if torch.equal(half.to(torch.float32), exact) else exact


class Grouped(nn.Module):
    """The layer. Its tensors are buffers, so they move and save like any module's.

    codes: uint8 [out, in * STORED[bits] / 8], see `pack`; scales, offsets: [out, in / group], each float32 or float16;
    order: int64 [in] or None, GPTQ's act-order: x[..., order] is taken first, and the groups lie in that order;
    bias: [out] or None. `kernel` says what multiplies. `activations`: "int8" lets a kernel round the inputs to that where
    it is faster for it, "float" does not. A kernel may keep the numbers in another form, `arranged`: what the buffers
    then hold is its own, and `select` knows.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    order: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        offsets: Tensor,
        bits: int,
        group: int,
        bias: Tensor | None = None,
        order: Tensor | None = None,
        kernel: str = "torch",
        activations: str = "float",
    ) -> None:
        super().__init__()
        self.bits, self.group, self.kernel, self.activations = bits, group, kernel, activations
        self.arranged: object | None = None
        self.out_features, self.in_features = codes.shape[0], codes.shape[1] * 8 // STORED[bits]
        if scales.shape != offsets.shape or tuple(scales.shape) != (self.out_features, self.in_features // group):
            raise ValueError(
                f"{list(scales.shape)} scales and {list(offsets.shape)} offsets do not fit {self.out_features} rows "
                f"of {self.in_features} codes in groups of {group}"
            )
        if self.in_features % group:
            raise ValueError(f"groups of {group} do not divide {self.in_features} inputs")
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scales", scales.contiguous())
        self.register_buffer("offsets", offsets.contiguous())
        self.register_buffer("order", order)
        self.register_buffer("bias", bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, group={self.group}, kernel={self.kernel}"

    @property
    def nbytes(self) -> int:
        """Bytes that stay in memory."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def native_product(self) -> tuple[int, int] | None:
        """The layer as kernels of a whole decoder layer call it (`struct Linear` of linear.h), where its kernel is native."""
        if self.kernel != "native":
            return None
        return cast(NativeKernel, kernel(self.kernel)).native_product(self)

    def select(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights of some outputs, int64 [N] -> [N, in], as `rows` has them: an embedding's lookup."""
        if self.arranged is not None:
            return kernel(self.kernel).select(self, ids, dtype)
        return self._weights(self.codes[ids], self.scales[ids], self.offsets[ids], dtype)

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights of some outputs, [stop - start, in], in the groups' order: exact in float32 or above, then cast."""
        if self.arranged is not None:
            return self.select(torch.arange(start, stop, device=self.codes.device), dtype)
        some = slice(start, stop)
        return self._weights(self.codes[some], self.scales[some], self.offsets[some], dtype)

    def _weights(self, codes: Tensor, scales: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = unpack(codes, self.bits).view(len(codes), -1, self.group).to(wide)
        return values.mul_(scales[..., None].to(wide)).add_(offsets[..., None].to(wide)).flatten(1).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [out, in] that the codes stand for, inputs in the model's own order."""
        weights = self.rows(0, self.out_features, dtype)
        if self.order is None:
            return weights
        ordered = torch.empty_like(weights)
        ordered[:, self.order] = weights
        return ordered

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        if self.order is not None:
            flat = flat[:, self.order]
        if self.kernel == "torch":
            out = _torch_product(self, flat)
        else:
            out = kernel(self.kernel).product(self, flat.contiguous())
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.reshape(*x.shape[:-1], self.out_features)

    @classmethod
    def joined(cls, layers: Sequence[Self]) -> Self | None:
        """One layer whose outputs are those of `layers` end to end; None when they differ in more than their size."""
        first = layers[0]
        if not all(_alike(first, layer) for layer in layers[1:]):
            return None
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return cls(
            torch.cat([layer.codes for layer in layers]),
            narrowed(torch.cat([layer.scales.float() for layer in layers])),
            narrowed(torch.cat([layer.offsets.float() for layer in layers])),
            first.bits,
            first.group,
            torch.cat(biases) if biases else None,
            first.order,
            first.kernel,
            first.activations,
        )


def kernel(name: str) -> Kernel:
    """The kernel of that name, imported now. Raises ImportError where what it needs is not installed."""
    return cast(Kernel, importlib.import_module(KERNELS[name]))


def obstacle(name: str, layer: Grouped, dtype: torch.dtype) -> str | None:
    """Why the kernel `name` can't compute this layer; None: it can."""
    if name == "torch":
        return None
    try:
        return kernel(name).obstacle(layer, dtype)
    except ImportError as error:
        return f"it can't be imported: {error}"


def best(layer: Grouped, dtype: torch.dtype) -> str:
    """The kernel `auto` stands for: the first of `AUTO` for the layer's device that can compute it, else torch."""
    names = AUTO.get(layer.codes.device.type, ())
    return next((name for name in names if obstacle(name, layer, dtype) is None), "torch")


def _torch_product(layer: Grouped, x: Tensor) -> Tensor:
    """Some rows at a time are unpacked in x's dtype and multiplied, so the scratch is bounded whatever the layer."""
    step = max(1, SCRATCH // layer.in_features)
    if step >= layer.out_features:
        return F.linear(x, layer.rows(0, layer.out_features, x.dtype))
    out = x.new_empty(x.shape[0], layer.out_features)
    for start in range(0, layer.out_features, step):
        stop = min(start + step, layer.out_features)
        out[:, start:stop] = F.linear(x, layer.rows(start, stop, x.dtype))
    return out


def _alike(one: Grouped, other: Grouped) -> bool:
    same_order = (
        one.order is None if other.order is None else (one.order is not None and torch.equal(one.order, other.order))
    )

    def kind(layer: Grouped) -> tuple[object, ...]:
        return layer.bits, layer.group, layer.kernel, layer.activations, layer.in_features, layer.arranged

    return (
        kind(one) == kind(other) and one.arranged is None and (one.bias is None) == (other.bias is None) and same_order
    )
