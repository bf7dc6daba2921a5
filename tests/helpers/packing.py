"""The packed formats written and read one code at a time, as slowly as possible: what the quick readers are held to;
and a layer read by a quantizer without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from turnout.core import ModelInfo
from turnout.plugins.quant.grouped import Grouped

LAYER = "model.layers.0.mlp.up_proj"

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Sequence[int], bits: int) -> list[int]:
    """Codes end to end in signed 32-bit words, the first in the lowest bits."""
    stream = sum(code << (place * bits) for place, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return [_signed(stream >> (32 * word) & 0xFFFFFFFF) for word in range(count)]


def columns(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows * bits / 32, n] of [rows, n]: packed down each column."""
    return torch.tensor([words(column, bits) for column in codes.T.tolist()], dtype=torch.int32).T.contiguous()


def rows(codes: Tensor, bits: int) -> Tensor:
    """int32 [n, columns * bits / 32] of [n, columns]: packed along each row."""
    return columns(codes.T, bits).T.contiguous()


def awq_rows(codes: Tensor) -> Tensor:
    """int32 [n, columns / 8]: nibble i of a word holds column AWQ_ORDER[i] of its eight."""
    packed = [
        [_signed(sum(row[start + AWQ_ORDER[i]] << (4 * i) for i in range(8))) for start in range(0, len(row), 8)]
        for row in codes.tolist()
    ]
    return torch.tensor(packed, dtype=torch.int32)


def product(codes: Tensor, scales: Tensor, zeros: Tensor, index: Iterable[int]) -> Tensor:
    """float64 [out, in] of codes [out, in], scales and zeros [out, groups]: the definition, in float64."""
    place = torch.tensor(list(index))
    return scales.double()[:, place] * (codes.double() - zeros.double()[:, place])


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def info(dtype: torch.dtype = torch.float32) -> ModelInfo:
    return ModelInfo("folder", "Llama", (), 64, 128, dtype, torch.device("cpu"), 1000)


def read(quantizer: Any, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = LAYER) -> Grouped:
    """The layer a quantizer makes of one layer's tensors."""
    quantizer.prepare(settings, info())
    layer = quantizer.linear(name, tensors)
    assert isinstance(layer, Grouped)
    return layer


def close(layer: Grouped, weights: Tensor, bias: Tensor | None = None) -> None:
    """The layer's weights are these, and it multiplies by them, both to float64's rounding."""
    torch.testing.assert_close(layer.dequantize(torch.float64), weights, rtol=1e-12, atol=1e-12)
    x = torch.randn(3, weights.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.linear(x, weights, None if bias is None else bias.double())
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)
