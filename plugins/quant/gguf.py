"""The quantized tensors of a .gguf file, kept packed in memory as they are in the file.

It knows no engine and no file: the tensors come from the format's reader, their block layouts are `gguf_blocks`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from turnout.core import ModelError, ModelInfo
from turnout.plugins.quant import gguf_blocks
from turnout.plugins.quant.grouped import Grouped, pack
from turnout.plugins.quant.stored import Layers, check_kernel


@dataclass
class Gguf:
    """Layers of a .gguf file as small integers with a scale and an offset for each 16 or 32 of them. `activations`:
    "int8" rounds a layer's inputs to 8 bits in blocks of 32, as llama.cpp does, "float" does not."""

    kernel: str = "auto"  # auto, torch, native or triton
    activations: str = "int8"

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset({"gguf"})
    packed_format: ClassVar[str] = "gguf"

    def __post_init__(self) -> None:
        check_kernel(self.kernel, self.activations)
        self._layers = Layers(self.kernel, activations=self.activations)

    def kernels(self) -> str:
        return self._layers.kernels()

    def prepare(self, settings: Mapping[str, Any] | None, info: ModelInfo) -> None:
        self._layers = Layers.of(self.kernel, self.activations, info)

    def check_stacked(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor of several matrices would be made floats. Raises ModelError."""
        raise ModelError(
            f"quant=gguf can't keep {name}, {list(shape)}, packed: it stacks the matrices of several experts; serve the "
            f"model with quant=none"
        )

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A `Grouped` layer of packed rows, or a plain one where the file holds floats."""
        kinds = [leaf for leaf in tensors if leaf in gguf_blocks.KINDS]
        if not kinds:
            return self._layers.plain(tensors)
        found = gguf_blocks.codes(kinds[0], tensors[kinds[0]])
        bias = tensors.get("bias")
        layer = Grouped(
            pack(found.codes, found.bits),
            found.scales,
            found.offsets,
            found.bits,
            found.group,
            None if bias is None else bias.to(self._layers.dtype),
            activations=self.activations,
        )
        return self._layers.chosen(name, layer)

    def embedding(self, name: str, linear: nn.Module) -> nn.Module:
        assert isinstance(linear, Grouped)
        return Table(linear, self._layers.dtype)


class Table(nn.Module):
    """An embedding whose rows stay packed: those looked up are made floats."""

    def __init__(self, layer: Grouped, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self._dtype = layer, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., dim]."""
        return self.layer.select(ids.flatten(), self._dtype).view(*ids.shape, -1)
