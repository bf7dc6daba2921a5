"""Checkpoints of AWQ (Lin et al., arXiv 2306.00978) as AutoAWQ writes them: 4 bits with a zero point for each group.

GEMM layout: qweight int32 [in, out / 8], a word holds 8 neighbouring outputs; qzeros int32 [groups, out / 8];
scales [groups, out]. GEMV layout: qweight int32 [out, in / 8], a word holds 8 neighbouring inputs in order;
qzeros int32 [out, padded groups / 8]; scales [out, padded groups].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from turnout.core import ModelError, ModelInfo
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

BITS, PER_WORD = 4, 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # GEMM: output i of 8 lies in nibble PLACES[i] (nibbles hold 0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Awq:
    """AWQ checkpoints: 4 bits, any group size that divides a layer's inputs, or one group a row."""

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset({"awq"})

    kernel: str = "auto"  # auto, torch, native or triton
    activations: str = "float"  # "int8": a kernel may round a layer's inputs to 8 bits where that is faster

    def __post_init__(self) -> None:
        check_kernel(self.kernel, self.activations)
        self._layers = Layers(self.kernel)
        self._group, self._by_rows = -1, False

    def prepare(self, settings: Mapping[str, Any] | None, info: ModelInfo) -> None:
        """Check what config.json says of the format."""
        if settings is None:
            raise ModelError(
                "quant=awq reads checkpoints that are quantized already, and this one holds floats; make one with "
                "`turnout quantize method=awq`, or choose quant=int8"
            )
        self._layers = Layers.of(self.kernel, self.activations, info)
        bits = whole_number(settings, ("bits", "w_bit"))
        if bits != BITS:
            raise ModelError(f"quantization_config.bits is {bits}, and quant=awq reads {BITS}")
        self._group = whole_number(settings, ("group_size", "q_group_size"))
        check_group(self._group)
        layout = str(settings.get("version", settings.get("checkpoint_format", "gemm"))).lower()
        if layout not in ("gemm", "gemv"):
            raise ModelError(
                f"quantization_config.version is {layout}, and quant=awq reads gemm and gemv; save it as gemm"
            )
        self._by_rows = layout == "gemv"
        if (backend := settings.get("backend", "autoawq")) not in ("autoawq", "gptqmodel"):
            raise ModelError(f"quantization_config.backend is {backend}, and quant=awq reads what autoawq writes")

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A `Grouped` layer, or a plain one where the checkpoint holds a plain weight."""
        if "qweight" not in tensors:
            tensors_of(name, tensors, ("weight",))
            return self._layers.plain(tensors)
        if "weight" in tensors:
            raise ModelError(f"{name} is stored twice, as weight and as qweight; drop one of them")
        read = self._gemv if self._by_rows else self._gemm
        return self._layers.grouped(name, read(name, tensors))

    def kernels(self) -> str:
        return self._layers.kernels()

    def _gemm(self, name: str, tensors: Mapping[str, Tensor]) -> Packed:
        qweight, qzeros, scales = tensors_of(name, tensors, ("qweight", "qzeros", "scales"))
        num_inputs, num_outputs = qweight.shape[0], qweight.shape[1] * PER_WORD
        num_groups = self._num_groups(name, num_inputs)
        self._check_shapes(
            name,
            qzeros=(qzeros, (num_groups, qweight.shape[1])),
            scales=(scales, (num_groups, num_outputs)),
        )
        index = in_sequence(num_inputs, num_inputs // num_groups, qweight.device)
        codes, zeros = _deinterleaved(qweight), _deinterleaved(qzeros)
        return Packed(codes.T, scales.T, zeros.T, BITS, index, tensors.get("bias"))

    def _gemv(self, name: str, tensors: Mapping[str, Tensor]) -> Packed:
        qweight, qzeros, scales = tensors_of(name, tensors, ("qweight", "qzeros", "scales"))
        num_outputs, num_inputs = qweight.shape[0], qweight.shape[1] * PER_WORD
        num_groups = self._num_groups(name, num_inputs)
        padded = qzeros.shape[1] * PER_WORD
        self._check_shapes(name, scales=(scales, (num_outputs, max(padded, num_groups))))
        index = in_sequence(num_inputs, num_inputs // num_groups, qweight.device)
        codes = unwords(qweight.T, BITS, num_inputs).T
        zeros = unwords(qzeros.T, BITS, num_groups).T
        return Packed(codes, scales[:, :num_groups], zeros, BITS, index, tensors.get("bias"))

    def _num_groups(self, name: str, num_inputs: int) -> int:
        group = num_inputs if self._group == -1 else self._group
        if num_inputs % group:
            raise ModelError(
                f"{name} has {num_inputs} inputs, which groups of quantization_config.group_size={group} do not divide"
            )
        return num_inputs // group

    def _check_shapes(self, name: str, **expected: tuple[Tensor, tuple[int, int]]) -> None:
        for leaf, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                layout = "gemv" if self._by_rows else "gemm"
                raise ModelError(
                    f"{name}.{leaf} is {list(tensor.shape)}; with group_size={self._group} in the {layout} layout it "
                    f"must be {list(shape)}: quantization_config is not this checkpoint's"
                )


def _deinterleaved(words: Tensor) -> Tensor:
    """uint8 [rows, n * 8] of int32 [rows, n]: each word's nibbles in the order of the outputs."""
    nibbles = [(words >> (4 * place)) & 15 for place in PLACES]
    return torch.stack(nibbles, dim=-1).flatten(1).to(torch.uint8)
