"""The quantized tensors of a .gguf file as they are stored, under transformers' names. It knows no model.

A row of a quantized matrix is whole blocks of bytes. Such a matrix is offered as uint8 [rows, bytes of a row], and the
last part of its name is its type: model.layers.0.mlp.up_proj.Q4_1 in place of ...up_proj.weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from turnout.core.model import StoredTensor
from turnout.plugins.formats.gguf.reader import Reader
from turnout.plugins.formats.gguf.weights import halves_apart

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FLOATS = ("F32", "F16", "BF16", "F64")


class Packed:
    """Raises ValueError for a file that can't be read, and for matrices of a type that is not kept packed."""

    def __init__(self, file: Path, num_layers: int, modules: Iterable[str]) -> None:
        """`modules`: paths, in transformers' model, of the layers whose weights are wanted packed."""
        import gguf

        self._reader = Reader(file)
        kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == self._reader.arch)
        table = gguf.get_tensor_name_map(kind, num_layers)
        self.tensors: dict[str, StoredTensor] = {}  # "MODULE.TYPE"; uint8 [rows, bytes of a row]
        self._keys: dict[str, str] = {}  # their names in the file
        refused = []
        for module in modules:
            key = f"{table.get_name(module)}.weight"
            stored = self._reader.tensors.get(key)
            if stored is None or stored.tensor_type.name in FLOATS:
                continue
            if stored.tensor_type.name not in KINDS:
                refused.append(f"{key} is {stored.tensor_type.name}")
                continue
            rows, size = (int(n) for n in stored.data.shape)
            name = f"{module}.{stored.tensor_type.name}"
            self.tensors[name], self._keys[name] = StoredTensor((rows, size), torch.uint8), key
        if refused:
            more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
            raise ValueError(f"{', '.join(refused[:3])}{more}; only {', '.join(KINDS)} are kept packed")

    def read(self, name: str) -> Tensor:
        """A copy of one of `tensors`, its rows in the order the model wants them."""
        key = self._keys[name]
        return halves_apart(self._reader, key, torch.from_numpy(self._reader.tensors[key].data.copy()))
