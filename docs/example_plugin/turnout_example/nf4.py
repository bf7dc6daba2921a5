"""4-bit NormalFloat (QLoRA, arXiv 2305.14314): sixteen levels at the quantiles of a normal distribution, scaled by block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.core import ModelError


def levels() -> Tensor:
    """float32 [16], ascending from -1 to 1, 0 among them: eight equal slices of the one half of a normal distribution
    and seven of the other, the outermost at half a slice from the end (section 3 of the paper)."""
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above = torch.special.ndtri(torch.linspace(0.5, outermost, 9, dtype=torch.float64)[1:])
    below = -torch.special.ndtri(torch.linspace(0.5, outermost, 8, dtype=torch.float64)[1:])
    return (torch.cat([below.flip(0), torch.zeros(1, dtype=torch.float64), above]) / above[-1]).float()


class NF4Linear(nn.Module):
    """A layer that unpacks its weights whenever it is called: two codes a byte, a scale for each block of inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, block: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        blocks = weight.float().view(self.out_features, -1, block)
        scales = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float16).tiny)
        table = levels().to(weight.device)
        between = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(blocks / scales, between).to(torch.uint8).view(self.out_features, -1)
        self.register_buffer("codes", codes[:, ::2] | codes[:, 1::2] << 4)
        self.register_buffer("scales", scales.squeeze(-1))
        self.register_buffer("levels", table)
        self.register_buffer("bias", bias)

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1).int()
        return (self.levels[codes].view(*self.scales.shape, -1) * self.scales[..., None]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize().to(x.dtype), self.bias)


@dataclass
class NF4:
    """Weights in 4 bits and, for each `block` inputs, a scale."""

    block: int = 64

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset()  # of floats only

    def __post_init__(self) -> None:
        if self.block < 2 or self.block % 2:
            raise ValueError(f"quant.block must be even and at least 2, got {self.block}")

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        weight = tensors["weight"]
        if weight.shape[1] % self.block:
            raise ModelError(f"{name} has {weight.shape[1]} inputs, which blocks of {self.block} do not divide")
        return NF4Linear(weight, tensors.get("bias"), self.block)
