"""Checkpoints of compressed-tensors, as llm-compressor writes them. Each layer goes to the reader of its format.

pack-quantized is read here: weight_packed int32 [out, in * bits / 32], codes end to end along a row, a weight w stored
as w + 2**(bits - 1); weight_scale [out, groups]; weight_shape int64 [2]; perhaps weight_zero_point int32
[out * bits / 32, groups], packed down a column the same way, and weight_g_idx int32 [in]. The 8-bit formats are read by
`compressed_8bit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from turnout.core import ModelError, ModelInfo
from turnout.plugins.quant import compressed_8bit, schemes
from turnout.plugins.quant.schemes import Scheme
from turnout.plugins.quant.stored import (
    Layers,
    Packed,
    check_group,
    check_kernel,
    in_sequence,
    tensors_of,
    unwords,
    whole_number,
)

PACKED = "pack-quantized"
EIGHT_BIT = ("int-quantized", "float-quantized", "naive-quantized")  # of compressed_8bit
BITS = (2, 3, 4, 5, 6, 8)


@dataclass
class CompressedTensors:
    """compressed-tensors checkpoints: packed integer weights of 2 to 8 bits, and 8-bit integers and floats."""

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset({"compressed-tensors"})

    kernel: str = "auto"  # of packed layers: auto, torch, native or triton
    activations: str = "float"  # of packed layers; "int8": a kernel may round a layer's inputs to 8 bits

    def __post_init__(self) -> None:
        check_kernel(self.kernel, self.activations)
        self._layers = Layers(self.kernel)
        self._schemes: tuple[Scheme, ...] = ()

    def prepare(self, settings: Mapping[str, Any] | None, info: ModelInfo) -> None:
        """Check what config.json says of every group of layers."""
        if settings is None:
            raise ModelError(
                "quant=compressed-tensors reads checkpoints that are quantized already, and this one holds floats; "
                "make one with `turnout quantize method=rtn`, or choose quant=int8"
            )
        self._layers = Layers.of(self.kernel, self.activations, info)
        self._schemes = schemes.read(settings)
        for scheme in self._schemes:
            if scheme.format == PACKED:
                _check_packed(scheme)
            elif scheme.format in EIGHT_BIT:
                compressed_8bit.check(scheme)
            else:
                known = ", ".join(sorted({PACKED, *EIGHT_BIT}))
                raise ModelError(
                    f"{scheme} is of a format that quant=compressed-tensors does not read; it reads {known}"
                )

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The layer in the form its scheme describes, or a plain one where the checkpoint holds plain floats."""
        if "weight_packed" not in tensors and "weight_scale" not in tensors:
            tensors_of(name, tensors, ("weight",))
            return self._layers.plain(tensors)
        scheme = self._scheme(name)
        if (scheme.format == PACKED) != ("weight_packed" in tensors):
            raise ModelError(f"{name} falls under {scheme}, but holds {', '.join(sorted(tensors))}")
        if scheme.format == PACKED:
            return self._layers.grouped(name, _packed(name, tensors, scheme))
        kernel = "torch" if self._layers.kernel == "torch" else "auto"
        made = compressed_8bit.layer(name, tensors, scheme, self._layers.dtype, kernel)
        self._layers.used[scheme.format] += 1
        return made

    def kernels(self) -> str:
        return self._layers.kernels()

    def _scheme(self, name: str) -> Scheme:
        """An exact name or a pattern goes before "Linear", which names every layer."""
        covering = [scheme for scheme in self._schemes if scheme.covers(name)]
        if not covering:
            raise ModelError(f"{name} is stored quantized, but no target in quantization_config.config_groups names it")
        return next((scheme for scheme in covering if "Linear" not in scheme.targets), covering[0])


def _check_packed(scheme: Scheme) -> None:
    weights = scheme.weights
    bits = whole_number(weights, ("num_bits",))
    if weights.get("type", "int") != "int" or bits not in BITS:
        raise ModelError(f"{scheme}: packed weights are read as integers of {', '.join(map(str, BITS))} bits")
    if scheme.inputs is not None:
        raise ModelError(f"{scheme} quantizes activations too, and packed weights are multiplied by floats only")
    strategy = weights.get("strategy")
    if strategy not in (None, "group", "channel", "tensor"):
        raise ModelError(f"{scheme} has the strategy {strategy}; packed weights come by group, channel or tensor")
    if strategy == "group":
        check_group(whole_number(weights, ("group_size",)), f"{scheme}: group_size")


def _packed(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> Packed:
    bits, symmetric = int(scheme.weights["num_bits"]), scheme.weights.get("symmetric", True)
    words, scales, shape = tensors_of(name, tensors, ("weight_packed", "weight_scale", "weight_shape"))
    num_outputs, num_inputs = (int(size) for size in shape)
    if tuple(words.shape) != (num_outputs, -(-num_inputs * bits // 32)):
        raise ModelError(
            f"{name}.weight_packed is {list(words.shape)}; {num_outputs} x {num_inputs} weights of {bits} bits, packed "
            f"without gaps, make {[num_outputs, -(-num_inputs * bits // 32)]}"
        )
    scales = scales.reshape(-1, 1).expand(num_outputs, 1) if scales.numel() == 1 else scales.reshape(num_outputs, -1)
    num_groups = scales.shape[1]
    index = tensors.get("weight_g_idx")
    if index is None or bool((index < 0).all()):  # -1 everywhere: no order was ever set
        group = _group(name, scheme, num_inputs, num_groups)
        index = in_sequence(num_inputs, group, words.device)
    return Packed(
        codes=unwords(words.T, bits, num_inputs).T,
        scales=scales,
        zeros=_zero_points(name, tensors, bits, bool(symmetric), num_outputs, num_groups),
        bits=bits,
        index=index.long(),
        bias=tensors.get("bias"),
    )


def _group(name: str, scheme: Scheme, num_inputs: int, num_groups: int) -> int:
    group = scheme.weights.get("group_size") if scheme.weights.get("strategy", "group") == "group" else None
    group = num_inputs if group in (None, -1) else int(group)
    if num_groups == -(-num_inputs // group):
        return group
    raise ModelError(
        f"{name} has {num_inputs} inputs and scales for {num_groups} groups, but {scheme} has groups of {group}"
    )


def _zero_points(
    name: str, tensors: Mapping[str, Tensor], bits: int, symmetric: bool, num_outputs: int, num_groups: int
) -> Tensor:
    """Of the codes as stored, from 0 up: float32 [out, groups]."""
    middle = 1 << (bits - 1)
    stored = tensors.get("weight_zero_point")
    if stored is None:
        if not symmetric:
            raise ModelError(f"{name} lacks weight_zero_point, which its asymmetric scheme needs")
        return torch.full((num_outputs, num_groups), float(middle), device=tensors["weight_packed"].device)
    if stored.dtype == torch.int32 and tuple(stored.shape) == (-(-num_outputs * bits // 32), num_groups):
        return unwords(stored, bits, num_outputs).float()
    return (stored.reshape(-1, num_groups).expand(num_outputs, num_groups)).float() + middle
