"""A 4-bit quantizer in a few lines, right by inspection, with a switch for each fault a reader of packed weights has had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32


class NibbleLinear(nn.Module):
    """W = scale * (code - zero); two codes in a byte, the first in the low half; one scale and zero for 32 inputs."""

    def __init__(self, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, fault: str) -> None:
        super().__init__()
        self.packed, self.scales, self.zeros, self.bias, self.fault = packed, scales, zeros, bias, fault
        self.out_features, self.in_features = packed.shape[0], packed.shape[1] * 2
        self.whole = self.dequantize() if fault == "floats kept" else None

    def dequantize(self) -> Tensor:
        halves = [self.packed & 15, self.packed >> 4]
        codes = torch.stack(halves[:: -1 if self.fault == "nibbles swapped" else 1], -1).flatten(1).float()
        scales, zeros = self.scales, self.zeros
        if self.fault == "groups off by one":
            scales = scales.roll(1, 1)
        if self.fault == "zero point shifted":
            zeros = zeros + 1
        if self.fault == "scale off":
            scales = scales * 1.05
        if self.fault == "one scale for all joined" and len(scales) > 576:
            scales = scales.amax(0, keepdim=True).expand_as(scales)
        grouped = codes.unflatten(1, (-1, GROUP))
        return ((grouped - zeros[..., None]) * scales[..., None]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.dequantize()
        if self.fault == "forward differs":
            weight = weight.roll(1, 0)
        if self.fault == "one scale for the batch" and x.numel():
            step = x.abs().max() / 127
            x = (x / step).round() * step
        if self.fault == "NaN swallowed":
            x = x.nan_to_num()
        if self.fault == "writes to its input":
            x.mul_(1.0).clamp_(-1, 1)
        bias = None if self.bias is None or self.fault == "bias dropped" else self.bias.float()
        out = F.linear(x.float(), weight, bias)
        return out if self.fault == "float32 out" else out.to(x.dtype)

    @classmethod
    def joined(cls, layers: Sequence[Self]) -> Self:
        packed, scales, zeros = (torch.cat([getattr(x, n) for x in layers]) for n in ("packed", "scales", "zeros"))
        fault = layers[0].fault
        if fault == "joined in another order":
            packed, scales, zeros = (t.roll(1, 0) for t in (packed, scales, zeros))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return cls(packed, scales, zeros, torch.cat(biases) if biases else None, fault)


@dataclass
class Nibbles:
    """4 bits, on the fly."""

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset()
    bits: ClassVar[int] = 4
    fault: ClassVar[str] = ""

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        from turnout.core import ModelError

        weight = tensors["weight"].float()
        if weight.shape[1] % GROUP:
            layer = "a layer" if self.fault == "refuses without a name" else name
            raise ModelError(f"{layer} has {weight.shape[1]} inputs, which groups of {GROUP} do not divide")
        grouped = weight.unflatten(1, (-1, GROUP))
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)  # 0 is always among the values
        scales = ((high - low) / 15).clamp(min=1e-12)
        zeros = (-low / scales).round()
        codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15).to(torch.uint8).flatten(1)
        if self.fault == "writes to the checkpoint":
            tensors["weight"].mul_(0.5)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        return NibbleLinear(packed, scales.half().float(), zeros, tensors.get("bias"), self.fault)


def broken(fault: str) -> Any:
    """Nibbles with a fault in it."""
    return type("Broken", (Nibbles,), {"fault": fault})
