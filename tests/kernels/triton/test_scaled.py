"""Products of 8-bit codes in Triton's interpreter, beside the same codes and scales multiplied in float64."""

from __future__ import annotations

import pytest
import torch
from interpreting import NO_INTERPRETER
from torch import Tensor

from turnout.plugins.quant import fp8_linear, int8_linear

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_INTERPRETER is not None, reason=f"{NO_INTERPRETER}")]
FLOAT8 = torch.float8_e4m3fn


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def widened(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    return codes.double() * scales.double().repeat_interleave(block, 1)[:, : codes.shape[1]]


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8], ids=str)
@pytest.mark.parametrize(("ins", "block", "rows"), [(192, None, 19), (256, 128, 1), (160, 64, 19), (192, 96, 1)])
def test_a_product_is_that_of_the_codes_times_their_scales(
    dtype: torch.dtype, ins: int, block: int | None, rows: int
) -> None:
    from turnout.kernels.triton.scaled import encode, product

    x, weight = encode(noise(rows, ins), dtype, block), encode(noise(50, ins, seed=1), dtype, block)
    want = widened(*x, block or ins) @ widened(*weight, block or ins).T
    got = product(x, *weight, block, torch.float32)
    assert (got.double() - want).abs().max() <= 1e-6 * want.abs().max()
    half = product(x, *weight, block, torch.bfloat16)
    assert half.dtype == torch.bfloat16 and (half.double() - want).abs().max() <= 0.004 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_int8_activations_have_the_codes_of_the_reference(dtype: torch.dtype) -> None:
    """Up to a last bit where the reference multiplies by the inverse of the scale."""
    from turnout.kernels.triton.scaled import encode

    x = noise(7, 200, dtype=dtype)
    x[3] = 0.0
    codes, scales = int8_linear.quantize_rows(x.float(), None)
    got = encode(x, torch.int8)
    assert (got.codes.int() - codes.int()).abs().max() <= 1
    assert (got.codes != codes).float().mean() < 0.01
    torch.testing.assert_close(got.scales[:, 0][scales > 0], scales[scales > 0], rtol=1e-6, atol=0)
    assert not got.codes[3].any()


def test_fp8_activations_have_the_codes_and_scales_of_the_reference_bit_for_bit() -> None:
    from turnout.kernels.triton.scaled import encode

    x = noise(5, 300)
    x[1, :128] = 0.0
    kept = fp8_linear.Fp8Linear(torch.zeros(1, 300).to(FLOAT8), torch.ones(1, 3), 128, fp8_linear.Activations.BLOCK)
    codes, scales = fp8_linear.encoded(x, kept)
    got = encode(x, FLOAT8, 128)
    assert torch.equal(got.codes.float(), codes)
    assert torch.equal(got.scales.repeat_interleave(128, 1)[:, :300], scales)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8], ids=str)
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_nan_and_infinity_spoil_their_own_row_only(dtype: torch.dtype, spoilt: float) -> None:
    from turnout.kernels.triton.scaled import encode, product

    x, weight = noise(3, 128), encode(noise(20, 128, seed=1), dtype, 64)
    x[1, 70] = spoilt
    got = product(encode(x, dtype, 64), *weight, 64, torch.float32)
    assert got.isnan().all(1).tolist() == [False, True, False] and got[[0, 2]].isfinite().all()


def test_codes_of_two_kinds_or_other_blocks_are_not_multiplied() -> None:
    from turnout.kernels.triton.scaled import encode, product

    x, weight = noise(3, 128), noise(20, 128, seed=1)
    for other in (encode(weight, FLOAT8, 64), encode(weight, torch.int8)):
        with pytest.raises(ValueError, match="can't be multiplied"):
            product(encode(x, torch.int8, 64), *other, 64, torch.float32)
    with pytest.raises(ValueError, match="multiples of 32"):
        product(encode(x, torch.int8, 24), *encode(weight, torch.int8, 24), 24, torch.float32)


def test_no_rows_give_no_rows() -> None:
    from turnout.kernels.triton.scaled import Codes, encode, product

    none = Codes(torch.empty(0, 64, dtype=torch.int8), torch.empty(0, 1))
    assert product(none, *encode(noise(8, 64), torch.int8), None, torch.float32).shape == (0, 8)
