"""Our Triton kernels beside attention, compiled and run on a GPU: each against the formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU, and there is none"),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def assert_near(got: Tensor, want: Tensor, roundings: float = 1.0) -> None:
    allowed = roundings * torch.finfo(got.dtype).eps * want.abs().max() + 1e-5 * want.abs().max()
    assert (got.double() - want).abs().max() <= allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 576, 4096, 8192])
def test_rms_norm(dtype: torch.dtype, dim: int) -> None:
    from turnout.kernels.triton.layers import rms_norm

    x, weight, residual = noise(70, dim, dtype=dtype), noise(dim, dtype=dtype, seed=1), noise(70, dim, dtype=dtype)
    summed = (x + residual).double()
    want = summed * (summed.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert_near(rms_norm(x, weight, 1e-5, residual=residual), want)
    assert torch.equal(residual.double(), summed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "size"), [(64, 64), (128, 128), (80, 32)])
def test_rotate(dtype: torch.dtype, dim: int, size: int) -> None:
    from turnout.kernels.triton.layers import rotate

    q, k = noise(33, 14, dim, dtype=dtype), noise(33, 2, dim, dtype=dtype, seed=1)
    angles = torch.rand(33, size // 2).cuda() * 100
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    for got, x in zip(rotate(q, k, cos, sin), (q.double(), k.double()), strict=True):
        first, second = x[..., :size].chunk(2, -1)
        turned = x[..., :size] * cos.double()[:, None] + torch.cat((-second, first), -1) * sin.double()[:, None]
        assert_near(got, torch.cat((turned, x[..., size:]), -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype: torch.dtype) -> None:
    from turnout.kernels.triton.layers import silu_mul

    both = noise(33, 2 * 1536, dtype=dtype)
    gate, up = both.double().chunk(2, -1)
    assert_near(silu_mul(both), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("rows", "ins", "outs", "group"), [(1, 4096, 4096, 128), (17, 576, 192, 64), (300, 512, 96, 32)]
)
def test_grouped(dtype: torch.dtype, bits: int, rows: int, ins: int, outs: int, group: int) -> None:
    from turnout.plugins.quant.grouped import Grouped, obstacle, pack

    codes = torch.randint(0, 1 << bits, (outs, ins), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = torch.rand(outs, ins // group, generator=torch.Generator().manual_seed(1)).half() * 0.02
    layer = Grouped(pack(codes, bits), scales, -scales * (1 << bits - 1), bits, group, kernel="triton").cuda()
    assert obstacle("triton", layer, dtype) is None
    x = noise(rows, ins, dtype=dtype)
    assert_near(layer(x), x.double() @ layer.dequantize().to(dtype).double().T, 2.0)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block", [None, 128, 96])
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_products_of_8_bit_codes(kind: torch.dtype, block: int | None, rows: int) -> None:
    from turnout.kernels.triton.scaled import encode, product

    x, weight = encode(noise(rows, 4096), kind, block), encode(noise(200, 4096, seed=1), kind, block)

    def wide(codes: Tensor, scales: Tensor) -> Tensor:
        return codes.double() * scales.double().repeat_interleave(block or 4096, 1)[:, :4096]

    assert_near(product(x, *weight, block, torch.bfloat16), wide(*x) @ wide(*weight).T)
