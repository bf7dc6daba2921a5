"""An opened .gguf file: its architecture, metadata and tensors. Knows no model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import numpy.typing as npt


class Reader:
    """Raises ValueError for what is no GGUF file, or only a part of one."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ValueError("reading it needs the package gguf: pip install 'turnout[gguf]'") from None
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, OverflowError) as error:
            raise ValueError(f"it is not a readable GGUF file, or was cut short ({error})") from error
        self.path = path
        self.fields = reader.fields
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.arch = str(self.get("general.architecture", "?"))
        if self.get("split.count", 1) > 1:
            raise ValueError("it is one part of a split file; join the parts with: llama-gguf-split --merge")

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields[key].contents() if key in self.fields else default

    def own(self, key: str, default: Any = None) -> Any:
        """The value of one of the architecture's own keys, named without its prefix."""
        return self.get(f"{self.arch}.{key}", default)

    def own_keys(self) -> list[str]:
        prefix = f"{self.arch}."
        return [name.removeprefix(prefix) for name in self.fields if name.startswith(prefix)]

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values as float32, its dimensions in torch's order."""
        import gguf
        import numpy as np

        tensor = self.tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"tensor {name} has type {tensor.tensor_type.name}, which can't be read") from error
        return values.astype(np.float32, copy=False).reshape(shape)
