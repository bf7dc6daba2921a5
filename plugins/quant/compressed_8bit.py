"""The 8-bit formats of compressed-tensors: int-quantized, float-quantized, naive-quantized.

    weight           int8 or float8_e4m3fn [out, in]
    weight_scale     [1], [out, 1], or [ceil(out / rows), ceil(in / inputs)] with the strategy block
    input_scale      [1], where activations have one fixed scale

With quantized activations integers become `int8_linear`'s layers, else `Grouped` ones (W8A16); floats become
`fp8_linear`'s. A dynamic scale of activations is always one a token: a scale for a whole batch would let requests change
each other's answers. It knows no other format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from turnout.core import ModelError
from turnout.plugins.quant import fp8_linear, int8_linear
from turnout.plugins.quant.fp8 import stored_layer
from turnout.plugins.quant.schemes import Scheme
from turnout.plugins.quant.stored import Layers, Packed, in_sequence, tensors_of

WEIGHTS = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "block")}  # strategies
OFFSET = 128  # of a stored code of a Grouped layer


def check(scheme: Scheme) -> None:
    """Raises ModelError for what is not read, before any weight is."""
    weights, inputs = scheme.weights, scheme.inputs
    kind = str(weights.get("type", "int"))
    if weights.get("num_bits") != 8 or kind not in WEIGHTS:
        raise ModelError(f"{scheme}: {scheme.format} is read with weights of 8-bit integers or floats")
    strategy = weights.get("strategy") or "tensor"
    if strategy not in WEIGHTS[kind]:
        raise ModelError(f"{scheme} has the strategy {strategy}; such weights come by {', '.join(WEIGHTS[kind])}")
    if strategy == "block" and _blocks(weights) is None:
        raise ModelError(f"{scheme}: block_structure must be [rows, inputs], got {weights.get('block_structure')!r}")
    if inputs is None:
        return
    if inputs.get("num_bits") != 8 or inputs.get("type", "int") != kind:
        raise ModelError(
            f"{scheme} has activations of {inputs.get('num_bits')}-bit {inputs.get('type', 'int')}; 8-bit {kind} weights "
            f"are multiplied by 8-bit {kind} activations, or by floats"
        )
    if strategy == "group" or not weights.get("symmetric", True) or not inputs.get("symmetric", True):
        raise ModelError(
            f"{scheme}: with quantized activations, weights and activations must be symmetric and weights by tensor or "
            f"channel; quantize the model again so, or weights only (W8A16)"
        )
    if not inputs.get("dynamic", False) and inputs.get("strategy", "tensor") != "tensor":
        raise ModelError(f"{scheme}: activations with given scales have one, strategy tensor")


def layer(
    name: str, tensors: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype, kernel: str = "auto"
) -> nn.Module:
    """The layer of a scheme that passed `check`. `kernel`: "torch" for the reference, "auto" for the quickest that can.
    Raises ModelError naming the layer."""
    weight, scales = tensors_of(name, tensors, ("weight", "weight_scale"))
    bias = tensors.get("bias")
    bias = None if bias is None else bias.to(dtype)
    wanted = fp8_linear.CODE if scheme.weights.get("type", "int") == "float" else torch.int8
    if weight.dtype != wanted:
        raise ModelError(f"{name}.weight is stored as {weight.dtype}; {scheme} promises {wanted}")
    fixed = None
    if scheme.inputs is not None and not scheme.inputs.get("dynamic", False):
        (fixed,) = tensors_of(name, tensors, ("input_scale",))
        if fixed.numel() != 1:
            raise ModelError(f"{name}.input_scale is {list(fixed.shape)}; one number is read")
        _no_offset(name, tensors, "input_zero_point")
    if wanted == fp8_linear.CODE:
        _no_offset(name, tensors, "weight_zero_point")
        made = stored_layer(name, weight, scales, _blocks(scheme.weights), bias, fixed, scheme.inputs is not None)
        made.kernel = fp8_linear.pick(kernel, made)
        return made
    if scheme.inputs is None:
        return _floats_times_integers(
            name, weight, scales, tensors.get("weight_zero_point"), bias, Layers(kernel, dtype)
        )
    _no_offset(name, tensors, "weight_zero_point")
    if scales.numel() not in (1, weight.shape[0]):
        raise ModelError(
            f"{name} has {list(scales.shape)} scales for {list(weight.shape)} weights; give one, or one a row"
        )
    per_row = scales.float().reshape(-1).expand(weight.shape[0])
    return int8_linear.make(name, weight, per_row, bias, None if fixed is None else fixed.float(), kernel)


def _floats_times_integers(
    name: str, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, layers: Layers
) -> nn.Module:
    """W8A16: groups along a row, or one group a row."""
    outs, ins = weight.shape
    scales = scales.expand(outs, 1) if scales.numel() == 1 else scales.reshape(outs, -1)
    if zeros is not None:
        zeros = zeros.expand(outs, 1) if zeros.numel() == 1 else zeros.reshape(outs, -1)
    packed = Packed(
        codes=(weight.to(torch.int16) + OFFSET).to(torch.uint8),
        scales=scales,
        zeros=torch.full_like(scales, OFFSET, dtype=torch.float32) if zeros is None else zeros.float() + OFFSET,
        bits=8,
        index=in_sequence(ins, -(-ins // scales.shape[1]), weight.device),
        bias=bias,
    )
    return layers.grouped(name, packed)


def _no_offset(name: str, tensors: Mapping[str, Tensor], leaf: str) -> None:
    if leaf in tensors and bool(tensors[leaf].any()):
        raise ModelError(f"{name}.{leaf} is not zero, though quantization_config calls the scheme symmetric")


def _blocks(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    size = weights.get("block_structure")
    if isinstance(size, str):  # older files: "128x128"
        size = [int(part) for part in size.split("x") if part.isdigit()]
    if weights.get("strategy") != "block" or not isinstance(size, (list, tuple)) or len(size) != 2:
        return None
    return int(size[0]), int(size[1])
