"""Weights rounded to nearest, in the layouts of compressed-tensors. It reads and writes no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FP8_LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = torch.finfo(torch.float16).tiny  # of a scale: a group of zeros has one too


@dataclass(frozen=True)
class Rounding:
    """How every layer is rounded: integers in groups (`rtn`), or 8 bits with one scale an output (`int8`, `fp8`)."""

    method: str
    bits: int = 8
    group: int = -1  # inputs that share a scale; -1: all of a row
    symmetric: bool = True

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        """What is stored for a layer's weight [out, in], by leaf. Scales have the weight's type, float16 of float32.
        Raises ValueError where the groups do not divide the inputs."""
        kind = torch.float16 if weight.dtype == torch.float32 else weight.dtype
        weights = weight.float()
        if self.method == "fp8":
            scale = _stored(weights.abs().amax(1, keepdim=True) / FP8_LARGEST, kind)
            codes = (weights / scale.float()).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
            return {"weight": codes, "weight_scale": scale}
        if self.method == "int8":
            scale = _stored(weights.abs().amax(1, keepdim=True) / 127, kind)
            return {"weight": (weights / scale.float()).round().clamp(-127, 127).to(torch.int8), "weight_scale": scale}
        num_outputs, num_inputs = weight.shape
        group = num_inputs if self.group == -1 else self.group
        if num_inputs % group:
            raise ValueError(f"groups of {group} do not divide its {num_inputs} inputs")
        codes, scales, zeros = _grouped(weights.view(num_outputs, -1, group), self.bits, self.symmetric, kind)
        tensors = {
            "weight_packed": words(codes.view(num_outputs, num_inputs), self.bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([num_outputs, num_inputs]),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = words(zeros.T, self.bits).T.contiguous()
        return tensors

    def settings(self, ignored: Sequence[str]) -> dict[str, Any]:
        """The quantization_config of config.json."""
        formats = {"rtn": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}
        kind = "float" if self.method == "fp8" else "int"
        weights: dict[str, Any] = {"num_bits": self.bits, "type": kind, "symmetric": self.symmetric, "dynamic": False}
        one_scale = self.method != "rtn" or self.group == -1
        weights |= {"strategy": "channel"} if one_scale else {"strategy": "group", "group_size": self.group}
        tokens = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        scheme = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None if self.method == "rtn" else tokens,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": formats[self.method],
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": list(ignored),
        }


def _grouped(weights: Tensor, bits: int, symmetric: bool, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, groups, group] from 0 up, scales and zero points [out, groups]; w is about scale * (code - zero)."""
    largest = (1 << bits) - 1
    if symmetric:
        middle = 1 << (bits - 1)
        scales = _stored(weights.abs().amax(2) / (middle - 0.5), kind)
        zeros = torch.full_like(scales, middle)
    else:
        low, high = weights.amin(2).clamp(max=0), weights.amax(2).clamp(min=0)
        scales = _stored((high - low) / largest, kind)
        zeros = (-low / scales.float()).round().clamp(0, largest)
    codes = ((weights / scales.float()[..., None]).round() + zeros.float()[..., None]).clamp(0, largest)
    return codes.to(torch.int32), scales, zeros.to(torch.int32)


def words(codes: Tensor, bits: int) -> Tensor:
    """int32 [n, m * bits / 32] of [n, m] codes: end to end along a row, the first in the lowest bits of a word."""
    num_rows, num = codes.shape
    padded = torch.nn.functional.pad(codes.long(), (0, -num % 32)).view(num_rows, -1, 32)
    packed = torch.zeros(num_rows, padded.shape[1], bits + 1, dtype=torch.int64)  # the last word takes what never is
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        packed[..., word] |= (padded[..., place] << shift) & 0xFFFFFFFF
        packed[..., word + 1] |= padded[..., place] >> (32 - shift)
    unsigned = packed[..., :bits].reshape(num_rows, -1)[:, : -(-num * bits // 32)]
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)


def _stored(scales: Tensor, kind: torch.dtype) -> Tensor:
    """In the type they are stored in, so that what is divided by is what will be multiplied by."""
    return scales.clamp(min=SMALLEST).to(kind)
