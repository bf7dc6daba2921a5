"""No quantization: linear layers compute in the floats they are given. It copies nothing and reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn


@dataclass
class Unquantized:
    """Keeps every weight as it is."""

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset()

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A plain linear layer over the tensors themselves, so a head may share the embedding's memory."""
        weight, bias = tensors["weight"], tensors.get("bias")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer
