"""8-bit floats: checkpoints that Hugging Face and vLLM call `fp8`, and on the fly for any float checkpoint.

In a checkpoint a layer holds `weight` in float8_e4m3fn, its scales as `weight_scale_inv` or `weight_scale` (one number,
one a row, or one a block of `weight_block_size`; a weight is code times scale under either name), perhaps the scale of
its activations as `activation_scale` or `input_scale`. A layer stored in floats stays float.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from turnout.core import ModelError, ModelInfo
from turnout.kernels import cpu as native
from turnout.plugins.quant import fp8_linear
from turnout.plugins.quant.fp8_linear import CODE, Activations, Fp8Linear
from turnout.plugins.quant.names import is_head, listed
from turnout.plugins.quant.none import Unquantized

WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
INPUT_SCALES = ("activation_scale", "input_scale")
NOT_CONVERTED = ("modules_to_not_convert", "ignored_layers")


@dataclass
class Fp8:
    """`kernel`: "native" (a CPU), "scaled_mm" (a GPU with 8-bit floats), "triton" (a GPU), "torch" (anywhere), or "auto". On the fly: `skip`, patterns of
    layers that stay float; `head`, quantize the output layer too. A checkpoint says itself what is quantized."""

    kernel: str = "auto"
    skip: list[str] = field(default_factory=list)
    head: bool = False

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset({"fp8"})

    def __post_init__(self) -> None:
        if self.kernel not in fp8_linear.KERNELS:
            raise ValueError(f"quant.kernel must be one of {', '.join(fp8_linear.KERNELS)}, got {self.kernel!r}")
        self._settings: Mapping[str, Any] | None = None
        self._dtype, self._traced = torch.float32, False
        self._used: Counter[str] = Counter()

    def prepare(self, settings: Mapping[str, Any] | None, info: ModelInfo) -> None:
        self._settings, self._dtype, self._traced = settings, info.dtype, info.traced
        if info.traced and self.kernel in ("native", "triton"):
            raise ModelError(
                f"quant.kernel={self.kernel} is not for torch.compile to trace; choose quant.kernel=torch or runner.mode=eager"
            )
        if settings is None:
            return
        if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise ModelError(f"quantization_config.fmt is {settings['fmt']}; quant=fp8 reads e4m3")
        scheme = settings.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise ModelError(f"quantization_config.activation_scheme must be dynamic or static, got {scheme!r}")
        _block_size(settings)
        if self.skip:
            raise ModelError("quant.skip is for quantizing on the fly; this checkpoint is quantized already")

    def kernels(self) -> str:
        """Which kernels the layers got."""
        made = [f"{name} for {count} layers" for name, count in sorted(self._used.items())]
        return ", ".join([*made, native.kernels()] if "native" in self._used else made)

    def check_stacked(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor of several matrices, which is no linear layer, is about to stay float. Raises ModelError unless it
        was asked for."""
        if self._settings is None and not listed(name, self.skip):
            raise ModelError(
                f"quant=fp8 can't quantize {name}, {list(shape)}: it stacks the matrices of several experts; leave such "
                f"tensors float with quant.skip=[{name.split('.')[-2]}], or serve the model with quant=none"
            )

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        if self._settings is not None:
            made = self._stored(name, tensors, self._settings)
        elif listed(name, self.skip) or (is_head(name) and not self.head):
            made = None
        else:
            codes, scales = fp8_linear.quantized(name, tensors["weight"])
            made = Fp8Linear(codes, scales, codes.shape[1], Activations.TOKEN, tensors.get("bias"))
        if made is None:
            return Unquantized().linear(name, {leaf: tensor.to(self._dtype) for leaf, tensor in tensors.items()})
        kernel = fp8_linear.pick(self.kernel, made)
        made.kernel = "torch" if kernel in ("native", "triton") and self._traced else kernel
        self._used[made.kernel] += 1
        return made

    def _stored(self, name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Fp8Linear | None:
        """A layer of the checkpoint; None: it is stored in floats."""
        weight = tensors.get("weight")
        if weight is None:
            raise ModelError(f"{name} is stored without a weight; it holds {', '.join(sorted(tensors))}")
        scales = next((tensors[leaf] for leaf in WEIGHT_SCALES if leaf in tensors), None)
        if weight.dtype != CODE:
            if scales is not None or not weight.is_floating_point() or weight.dtype.itemsize == 1:
                raise ModelError(f"{name}.weight is stored as {weight.dtype}; quant=fp8 reads {CODE}, or plain floats")
            return None
        kept = [pattern for key in NOT_CONVERTED for pattern in settings.get(key) or ()]
        if pattern := listed(name, kept):
            raise ModelError(
                f"{name} is stored in 8-bit floats, but quantization_config leaves {pattern!r} unconverted"
            )
        if scales is None:
            raise ModelError(f"{name}.weight is {CODE}, but the checkpoint holds no scale for it")
        fixed = next((tensors[leaf] for leaf in INPUT_SCALES if leaf in tensors), None)
        static = settings.get("activation_scheme", "dynamic") == "static"
        if static and fixed is None:
            raise ModelError(f"{name} lacks {' or '.join(INPUT_SCALES)}, which activation_scheme=static promises")
        return stored_layer(
            name, weight, scales, _block_size(settings), tensors.get("bias"), fixed if static else None, True
        )


def stored_layer(
    name: str,
    weight: Tensor,
    scales: Tensor,
    blocks: tuple[int, int] | None,
    bias: Tensor | None,
    fixed: Tensor | None,
    rounds: bool,
) -> Fp8Linear:
    """A layer with scales in any of the layouts: one number, one a row, one a block of `blocks` (rows, inputs). `rounds`:
    activations are 8-bit too. Raises ModelError naming the layer where the scales do not fit."""
    outs, ins = weight.shape
    if fixed is not None and fixed.numel() != 1:
        raise ModelError(f"{name} has {list(fixed.shape)} scales for its activations; quant=fp8 reads one")
    if blocks is not None and scales.dim() == 2 and scales.numel() > 1:
        wanted = (-(-outs // blocks[0]), -(-ins // blocks[1]))
        if tuple(scales.shape) != wanted:
            raise ModelError(
                f"{name} has {list(scales.shape)} scales; {outs} x {ins} weights in blocks of {list(blocks)} have "
                f"{list(wanted)}"
            )
        per_row, block, kind = fp8_linear.row_scales(scales, blocks[0], outs), blocks[1], Activations.BLOCK
    elif scales.numel() in (1, outs):
        per_row, block, kind = scales.float().reshape(-1, 1).expand(outs, 1), ins, Activations.TOKEN
    else:
        raise ModelError(f"{name} has {list(scales.shape)} scales for {outs} x {ins} weights; give one, or one a row")
    if not rounds:
        kind = Activations.FLOAT
    elif fixed is not None:
        kind = Activations.FIXED
    return Fp8Linear(weight, per_row, block, kind, bias, fixed)


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    size = settings.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise ModelError(f"quantization_config.weight_block_size must be [rows, inputs], got {size!r}")
    return size[0], size[1]
