"""A quantized model computed in float64 from what its layers say they are: the truth that kernels are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.core import ModelError
from turnout.core.optional import PreparedQuantizer
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.quant.fp8_linear import CODE, Activations, Fp8Linear
from turnout.plugins.quant.int8_linear import NativeInt8, TorchInt8


@dataclass
class Recording:
    """Any quantizer, and the layers it made."""

    quantizer: Any
    made: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def checkpoint_formats(self) -> frozenset[str]:
        formats: frozenset[str] = self.quantizer.checkpoint_formats
        return formats

    def check_stacked(self, name: str, shape: tuple[int, ...]) -> None:
        if hasattr(self.quantizer, "check_stacked"):
            self.quantizer.check_stacked(name, shape)

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        made: nn.Module = self.quantizer.linear(name, tensors)
        self.made[name] = made
        return made


def load_recorded(folder: Path, quantizer: Any, dtype: str = "float32") -> tuple[Model, dict[str, nn.Module]]:
    """The model as the engine loads it, on the CPU, and each layer as the quantizer made it."""
    info, recording = inspect(str(folder), dtype, "cpu"), Recording(quantizer)
    if isinstance(quantizer, PreparedQuantizer):
        quantizer.prepare(info.quantization, info)
    return load(info, recording), recording.made  # type: ignore[arg-type]


class Exact(nn.Module):
    """A layer's product in float64: the weights it dequantizes to, its inputs rounded by the stated rule."""

    def __init__(self, layer: Any, rounds: bool) -> None:
        super().__init__()
        self._layer, self._rounds = layer, rounds
        self._weight: Tensor = layer.dequantize().double() if hasattr(layer, "dequantize") else layer.weight.double()
        self._bias: Tensor | None = None if layer.bias is None else layer.bias.double()

    def forward(self, x: Tensor) -> Tensor:
        layer = self._layer
        if not self._rounds:
            pass
        elif isinstance(layer, (NativeInt8, TorchInt8)):
            x = int8_inputs(x, layer.fixed)
        elif isinstance(layer, Fp8Linear) and layer.activations is not Activations.FLOAT:
            x = fp8_inputs(x, layer)
        return F.linear(x, self._weight, self._bias)


def int8_inputs(x: Tensor, fixed: Tensor | None) -> Tensor:
    """scale = max|x| / 127 of each row, or the fixed one; code = round(x / scale), within 8 bits."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-300) / 127 if fixed is None else fixed.double()
    return (x / scale).round().clamp(-128, 127) * scale


def fp8_inputs(x: Tensor, layer: Fp8Linear) -> Tensor:
    """scale = max|x| / 448 of each row, of each block of a row, or the fixed one; the nearest 8-bit float of x / scale."""
    size = layer.block if layer.activations is Activations.BLOCK else x.shape[-1]
    made = []
    for part in x.split(size, -1):
        top = part.abs().amax(-1, keepdim=True).clamp_min(1e-300) / 448
        scale = top if layer.fixed is None else layer.fixed.double()
        made.append((part / scale).clamp(-448, 448).float().to(CODE).double() * scale)
    return torch.cat(made, -1)


def exact_logits(folder: Path, layers: Mapping[str, nn.Module], tokens: Sequence[int], rounds: bool = True) -> Tensor:
    """float64 logits [T, vocab] of one prompt by transformers' own code, the given layers in place of its own.
    `rounds`: they round their inputs as they do when serving."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from turnout.plugins.loader.shards import Shards

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    shards = Shards(Path(folder))
    floats = {name: shards.read(name) for name in shards.tensors if name.rpartition(".")[0] not in layers}
    absent = net.load_state_dict({n: t.double() for n, t in floats.items() if t.is_floating_point()}, strict=False)
    if lost := {name for name in absent.missing_keys if name.rpartition(".")[0] not in layers}:
        raise ModelError(f"the checkpoint lacks {lost}")
    for name, layer in layers.items():
        net.set_submodule(name, Exact(layer, rounds))
    with torch.inference_mode():
        logits: Tensor = net.eval()(input_ids=torch.tensor([tokens])).logits[0]
    return logits
