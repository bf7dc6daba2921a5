"""The kernels between matrix products, in Triton's interpreter, beside the same in float64 with PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpreting import NO_INTERPRETER
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_INTERPRETER is not None, reason=f"{NO_INTERPRETER}")]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(got: Tensor, want: Tensor, rounding: float = 0.51) -> None:
    """Within half a step of the dtype at each number, and some steps of float32's."""
    assert got.shape == want.shape
    info = torch.finfo(got.dtype)
    allowed = rounding * info.eps * want.abs() + 1e-6 * want.abs().max() + info.smallest_normal
    assert ((got.double() - want).abs() <= allowed).all()


def norm(x: Tensor, weight: Tensor, eps: float, plus: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + plus)


@every_dtype
@pytest.mark.parametrize(("dim", "plus"), [(64, 0.0), (576, 1.0), (100, 1.0)], ids=str)
def test_rms_norm_is_the_formula(dtype: torch.dtype, plus: float, dim: int) -> None:
    from turnout.kernels.triton.layers import rms_norm

    x, weight = noise(3, 2, dim, dtype=dtype), noise(dim, dtype=dtype, seed=1)
    x[1] *= 1e-3
    assert_rounded_once(rms_norm(x, weight, 1e-5, plus), norm(x, weight, 1e-5, plus))


@every_dtype
def test_rms_norm_adds_to_the_residual_in_place_and_normalizes_the_sum_as_it_is_kept(dtype: torch.dtype) -> None:
    from turnout.kernels.triton.layers import rms_norm

    x, weight, residual = noise(4, 96, dtype=dtype), noise(96, dtype=dtype, seed=1), noise(4, 96, dtype=dtype, seed=2)
    summed = x + residual
    got = rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(residual, summed)
    assert_rounded_once(got, norm(summed, weight, 1e-6, 0.0))


def test_a_residual_of_another_shape_is_refused() -> None:
    from turnout.kernels.triton.layers import rms_norm

    with pytest.raises(ValueError, match="shape"):
        rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6, residual=torch.ones(1, 8))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers writes it, in float64."""
    x, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = x.chunk(2, -1)
    return torch.cat((x * cos + torch.cat((-second, first), -1) * sin, rest), -1)


@every_dtype
@pytest.mark.parametrize("size", [64, 16, 48], ids=["all of a head", "the first part of it", "not a power of two"])
def test_rotate_turns_pairs_of_halves_and_lets_the_rest_pass(dtype: torch.dtype, size: int) -> None:
    from turnout.kernels.triton.layers import rotate

    fused = noise(5, 9, 64, dtype=dtype)
    q, k = fused[:, :6], fused[:, 6:]  # slices of one tensor
    angles = torch.rand(5, size // 2, generator=torch.Generator().manual_seed(3)) * 100
    cos, sin = (torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))
    for got, x in zip(rotate(q, k, cos, sin), (q, k), strict=True):
        assert_rounded_once(got, turned(x, cos, sin))
        assert torch.equal(got[..., size:], x[..., size:])


@every_dtype
@pytest.mark.parametrize("dim", [96, 1536])
def test_silu_mul_is_the_formula_and_large_gates_do_not_overflow(dtype: torch.dtype, dim: int) -> None:
    from turnout.kernels.triton.layers import silu_mul

    both = noise(3, 2 * dim, dtype=dtype)
    both[0, :4] = torch.tensor([-300.0, 300.0, -20.0, 0.0])
    gate, up = both.double().chunk(2, -1)
    assert_rounded_once(silu_mul(both), F.silu(gate) * up)


def test_codes_of_float8_are_torchs_bit_for_bit(run: Callable[..., Tensor]) -> None:
    """Every float16 up to 448, and the middle between each two codes: ties go to even."""
    numbers = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    codes = torch.arange(0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.cat((numbers, (codes[1:] + codes[:-1]) / 2))
    numbers = torch.cat((numbers, -numbers))
    numbers = numbers[numbers.abs() <= 448]
    assert torch.equal(run("to_fp8", numbers, torch.uint8), numbers.to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_code_of_float8_is_read_exactly(run: Callable[..., Tensor]) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)  # the others are NaN
    assert torch.equal(run("from_fp8", codes, torch.float16), codes.view(torch.float8_e4m3fn).half())


@pytest.fixture
def run() -> Callable[..., Tensor]:
    """Runs a function of numbers in `codes.py` over a tensor."""
    import interpreted_codes

    return interpreted_codes.run
