"""The GPU kernel of grouped layers, in Triton's interpreter, beside the layer's own weights in float64."""

from __future__ import annotations

import pytest
import torch
from interpreting import NO_INTERPRETER
from torch import Tensor

from turnout.kernels.triton import grouped as kernels
from turnout.plugins.quant.grouped import Grouped, obstacle, pack

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_INTERPRETER is not None, reason=f"{NO_INTERPRETER}")]


def layer(
    ins: int, outs: int, group: int, bits: int = 4, half: bool = True, bias: bool = False, ordered: bool = False
) -> Grouped:
    made = torch.Generator().manual_seed(ins + outs + bits)
    codes = torch.randint(0, 1 << bits, (outs, ins), generator=made, dtype=torch.uint8)
    scales = torch.rand(outs, ins // group, generator=made) * 0.02 + 0.001
    kind = torch.float16 if half else torch.float32
    return Grouped(
        pack(codes, bits),
        scales.to(kind),
        (-scales * (1 << bits) / 2).to(kind),
        bits,
        group,
        torch.randn(outs, generator=made) if bias else None,
        torch.randperm(ins, generator=made) if ordered else None,
        kernel="triton",
    )


def inputs(rows: int, ins: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, ins, generator=torch.Generator().manual_seed(rows)).to(dtype)


def assert_product(found: Grouped, x: Tensor) -> None:
    """Weights rounded to x's dtype, as the torch kernel's; a sum in float32; one rounding of the result."""
    weight = found.dequantize().to(x.dtype).double()
    want = x.double() @ weight.T + (0.0 if found.bias is None else found.bias.double())
    eps = torch.finfo(x.dtype).eps
    allowed = 2 * eps * want.abs().max() + 1e-5 * want.abs().max()
    got = found(x)
    assert got.dtype == x.dtype and got.shape == want.shape
    assert (got.double() - want).abs().max() <= allowed


@pytest.mark.parametrize(
    ("bits", "ins", "group"), [(2, 256, 128), (3, 192, 32), (4, 96, 16), (5, 192, 192), (8, 256, 128), (4, 192, 32)]
)
def test_it_multiplies_what_the_codes_stand_for(bits: int, ins: int, group: int) -> None:
    assert_product(layer(ins, 80, group, bits), inputs(3, ins))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_are_rounded_to_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    assert_product(layer(256, 70, 64), inputs(5, 256, dtype))


@pytest.mark.parametrize("rows", [1, 17, 70])
def test_any_number_of_rows_and_of_outputs(rows: int) -> None:
    assert_product(layer(128, 33, 32, half=False), inputs(rows, 128))


def test_few_outputs_split_the_inputs_among_programs() -> None:
    """576 inputs are 288 bytes of codes: 5 tiles, here in 3 parts of 2, the last of one and a half."""
    assert_product(layer(576, 192, 64), inputs(2, 576))


def test_a_bias_and_an_order_of_the_inputs_count() -> None:
    assert_product(layer(128, 40, 32, bias=True, ordered=True), inputs(4, 128))


def test_no_rows_give_no_rows() -> None:
    assert layer(64, 16, 32)(torch.empty(0, 64)).shape == (0, 16)


def test_what_it_cannot_compute_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = layer(64, 16, 32)
    assert obstacle("triton", found, torch.float32) is None
    assert "not float64" in (obstacle("triton", found, torch.float64) or "")
    monkeypatch.setattr(kernels, "interpreted", lambda function: False)
    assert "runs on a GPU" in (obstacle("triton", found, torch.float32) or "")
