"""8-bit integers on the fly, for any float checkpoint: weights one scale an output, activations one scale a token.

It knows no checkpoint format and no engine. The layers are those of `int8_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from turnout.core import ModelError, ModelInfo
from turnout.kernels import cpu as native
from turnout.plugins.quant import int8_linear
from turnout.plugins.quant.names import is_head, listed
from turnout.plugins.quant.none import Unquantized


@dataclass
class Int8:
    """Weights become int8 as they load, each output with its own scale; activations are quantized a token at a time as
    they come. `kernel`: "native" (a CPU), "triton" (a GPU), "torch" (anywhere), or "auto". `skip`: patterns of layers that stay float.
    `head`: quantize the output layer too."""

    kernel: str = "auto"
    skip: list[str] = field(default_factory=list)
    head: bool = True

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.kernel not in int8_linear.KERNELS:
            raise ValueError(f"quant.kernel must be one of {', '.join(int8_linear.KERNELS)}, got {self.kernel!r}")
        self._kernel = self.kernel

    def kernels(self) -> str:
        """What multiplies, where it is native code."""
        return native.kernels() if self._kernel in ("auto", "native") else ""

    def prepare(self, settings: Mapping[str, Any] | None, info: ModelInfo) -> None:
        """A model that torch.compile traces can't call native kernels."""
        if info.traced and self.kernel in ("native", "triton"):
            raise ModelError(
                f"quant.kernel={self.kernel} is not for torch.compile to trace; choose quant.kernel=torch or runner.mode=eager"
            )
        self._kernel = "torch" if info.traced else self.kernel

    def check_stacked(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor of several matrices, which is no linear layer, is about to stay float. Raises ModelError unless it
        was asked for."""
        if not listed(name, self.skip):
            raise ModelError(
                f"quant=int8 can't quantize {name}, {list(shape)}: it stacks the matrices of several experts; leave "
                f"such tensors float with quant.skip=[{name.split('.')[-2]}], or serve the model with quant=none"
            )

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        if listed(name, self.skip) or (is_head(name) and not self.head):
            return Unquantized().linear(name, tensors)
        codes, scales = int8_linear.quantized(name, tensors["weight"])
        return int8_linear.make(name, codes, scales, tensors.get("bias"), None, self._kernel)
