"""The quantized tensors of a .gguf file, kept packed in memory as they are in the file.

It knows no engine. What the file means is `plugins.formats.gguf`'s knowledge, its block layouts are `gguf_blocks`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from turnout.core import ModelError, ModelInfo
from turnout.plugins.formats.gguf.packed import Packed
from turnout.plugins.formats.source import Source, Stored, made_of
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

    def __post_init__(self) -> None:
        check_kernel(self.kernel, self.activations)
        self._layers = Layers(self.kernel, activations=self.activations)

    def kernels(self) -> str:
        return self._layers.kernels()

    def prepare(self, settings: Mapping[str, Any] | None, info: ModelInfo) -> None:
        """Raises ModelError for a model that is no .gguf file."""
        file = _file_of(info)
        if file is None or file.suffix.lower() != ".gguf":
            raise ModelError(
                f"quant=gguf keeps the tensors of a .gguf file packed, and {info.path} is made of "
                f"{'safetensors' if file is None else file.name}; name the file as model=FILE.gguf, or choose another "
                f"quantizer"
            )
        self._layers = Layers.of(self.kernel, self.activations, info)

    def source(self, info: ModelInfo, floats: Source, modules: frozenset[str]) -> Source:
        file = _file_of(info)
        assert file is not None, "`prepare` has seen it"
        try:
            packed = Packed(file, len(info.layers), sorted(modules))
        except ValueError as error:
            raise ModelError(
                f"{file} can't be served with quant=gguf: {error}; quant=none serves it in floats"
            ) from None
        return _Mixed(packed, floats)

    def leave(self, name: str, shape: tuple[int, ...]) -> None:
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


def _file_of(info: ModelInfo) -> Path | None:
    try:
        return made_of(info.path)
    except ValueError as error:
        raise ModelError(str(error)) from None


class _Mixed:
    """The packed matrices of a file; all the rest from its conversion in floats."""

    def __init__(self, packed: Packed, floats: Source) -> None:
        self._packed, self._floats = packed, floats
        self.tensors = dict(floats.tensors)
        for name, matrix in packed.matrices.items():
            self.tensors.pop(f"{name.rpartition('.')[0]}.weight")
            size = matrix.shape[0] * matrix.shape[1]
            self.tensors[name] = Stored(packed.file, matrix.offset, size, torch.uint8, matrix.shape)

    def read(self, name: str) -> Tensor:
        return self._packed.read(name) if name in self._packed.matrices else self._floats.read(name)
