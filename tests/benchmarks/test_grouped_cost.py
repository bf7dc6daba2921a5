"""What a product with packed 4-bit weights costs beside the float32 one, in one run. Nothing is asserted.

    pytest tests/benchmarks/test_grouped_cost.py --benchmark-group-by=param:rows

Layers of SmolLM2's widest shape, as many as a model has, so that weights come from memory as in a decode step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from turnout.kernels import cpu as native
from turnout.kernels.cpu.linear import PackedLinear
from turnout.plugins.quant.grouped import Grouped, pack

INS, OUTS, LAYERS = 576, 3072, 20
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}"),
]


def packed(bits: int, activations: str) -> nn.Module:
    scales = torch.rand(OUTS, INS // 32).half() / 100
    codes = torch.randint(0, 1 << bits, (OUTS, INS), dtype=torch.uint8)
    offsets = -scales.float() * (1 << (bits - 1))
    return Grouped(pack(codes, bits), scales, offsets, bits, 32, kernel="native", activations=activations)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "float32": lambda: nn.Linear(INS, OUTS, bias=False),
    "float32 native": lambda: PackedLinear(torch.randn(OUTS, INS), None),
    "4 bits, int8 activations": lambda: packed(4, "int8"),
    "4 bits, float activations": lambda: packed(4, "float"),
    "8 bits, int8 activations": lambda: packed(8, "int8"),
}


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_products_of_a_model_s_worth_of_layers(benchmark: BenchmarkFixture, kind: str, rows: int) -> None:
    layers, x = [KINDS[kind]() for _ in range(LAYERS)], torch.randn(rows, INS)

    def run() -> list[Tensor]:
        return [layer(x) for layer in layers]

    assert len(benchmark(run)) == LAYERS
