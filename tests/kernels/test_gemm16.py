"""Products with 16-bit weights: right on every level of instructions, and a row's bits are its own."""

from __future__ import annotations

import copy
import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from turnout.kernels import cpu as native
from turnout.kernels.cpu import build
from turnout.kernels.cpu.linear import FLOATS, PackedEmbedding, PackedLinear

pytestmark = pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}")
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=native.LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The products run on these instructions, and on no others."""
    wanted = native.LEVELS.index(request.param)
    library = native.library()
    chosen = library.turnout_bf16_chosen()
    if not library.turnout_bf16_force(wanted):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.turnout_bf16_force(chosen)


def layer(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> tuple[PackedLinear, torch.Tensor]:
    """A layer, and its weights and bias as float64 [out, in + 1]."""
    torch.manual_seed(0)
    weight, offset = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    exact = torch.cat([weight.double(), offset.double()[:, None] * bias], 1)
    return PackedLinear(weight, offset if bias else None), exact


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "bias"), [((96, 64), False), ((70, 100), True), ((33, 7), True), ((1, 65), False)])
def test_a_product_errs_at_most_twice_as_much_as_torchs_in_the_same_type(
    level: str, dtype: torch.dtype, shape: tuple[int, int], bias: bool
) -> None:
    made, exact = layer(shape, dtype, bias)
    for rows in (1, 2, 5, 15, 16, 17, 31, 33, 70):
        x = torch.randn(rows, shape[1]).to(dtype)
        want = F.linear(x.double(), exact[:, :-1], exact[:, -1])
        plain = F.linear(x, made.weight, made.bias.to(dtype) if bias and made.bias is not None else None)
        got = made(x)
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() <= 2 * (plain.double() - want).abs().max() + 1e-6


@pytest.mark.parametrize("dtype", HALVES)
def test_a_rows_bits_do_not_depend_on_its_neighbours(level: str, dtype: torch.dtype) -> None:
    made, _ = layer((96, 200), dtype, True)
    x = torch.randn(300, 200).to(dtype)
    whole = made(x.float())
    for first, last in ((0, 1), (7, 8), (3, 8), (0, 16), (5, 22), (280, 300), (0, 257)):
        assert torch.equal(made(x[first:last].float()), whole[first:last])
    spoiled = x.clone()
    spoiled[1], spoiled[40] = torch.nan, torch.inf
    got = made(spoiled.float())
    others = [row for row in range(300) if row not in (1, 40)]
    assert torch.equal(got[others], whole[others]) and not torch.isfinite(got[[1, 40]]).any()


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_in_pieces_are_the_same_rows(level: str, threads: int) -> None:
    made, exact = layer((64, 64), torch.bfloat16, False)
    made._threads = threads
    x = torch.randn(1100, 64).bfloat16()
    assert torch.equal(made(x.float())[1024:], made(x[1024:].float()))
    assert (made(x.float()).double() - x.double() @ exact[:, :-1].t()).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_no_rows_are_no_work(level: str, dtype: torch.dtype) -> None:
    """A step in which nothing is sampled asks the head for nothing."""
    for shape in ((96, 64), (1000, 512)):
        made, _ = layer(shape, dtype, True)
        assert made(torch.empty(0, shape[1], dtype=dtype)).shape == (0, shape[0])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(96, 64), (70, 100), (33, 7)])
def test_weights_are_found_as_they_were(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    made = PackedLinear(weight, None)
    ids = torch.tensor([[0, 5, shape[0] - 1], [1, 1, 17]])
    assert torch.equal(made.weight, weight) and torch.equal(PackedEmbedding(made)(ids), weight[ids])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_copy_computes_from_its_own_weights(dtype: torch.dtype) -> None:
    made, _ = layer((33, 40), dtype, True)
    x = torch.randn(2, 40).to(dtype)
    want = made(x)
    twin = copy.deepcopy(made)
    made.packed.zero_()
    assert torch.equal(twin(x), want) and not torch.equal(made(x), want)
    made.load_state_dict(twin.state_dict(), assign=True)
    assert torch.equal(made(x), want)


def test_a_native_layer_can_be_neither_cast_nor_given_what_its_kernel_does_not_read() -> None:
    made, _ = layer((33, 40), torch.bfloat16, False)
    want = made(torch.ones(1, 40))
    for move in (made.float, made.half, lambda: made.to("meta")):
        with pytest.raises(ValueError, match="load the model with the device and dtype you want"):
            move()
    assert torch.equal(made.to("cpu")(torch.ones(1, 40)), want)
    for wrong in (torch.ones(1, 39), torch.ones(1, 40, dtype=torch.float64), torch.ones(1, 40, device="meta")):
        with pytest.raises(AssertionError, match="a native layer of 40 inputs was given"):
            made(wrong)


def test_the_level_is_named_and_can_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.bfloat16_products() in native.LEVELS
    monkeypatch.setenv("TURNOUT_BF16", "widen")
    assert native._level() == 0
    monkeypatch.setenv("TURNOUT_BF16", "fastest")
    with pytest.raises(native.NativeError, match="TURNOUT_BF16 must be one of widen, dot, tiles, got 'fastest'"):
        native._level()


@pytest.mark.slow  # it compiles
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_kernels_for_every_width_of_vectors_are_right(
    march: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Builds for other machines, on each level that this one runs; layers beside the build for this very machine."""
    tool = build.compiler()
    if tool is None or not build.LEVELS.get(march, frozenset({"sse2"})) <= build.features():
        pytest.skip(f"this machine does not build or run {march}")
    made = tmp_path / f"{march}.so"
    sources = [str(build.FOLDER / f"{name}.cpp") for name in ("gemm", "gemm16", "layers")]
    flags = [flag.replace("-O3", "-O1") for flag in native.FLAGS]
    subprocess.run([tool, *flags, "-Wno-psabi", f"-march={march}", "-o", str(made), *sources], check=True)
    here, other = native.library(), ctypes.CDLL(str(made))
    for name in ("turnout_pack", "turnout_rms_norm", "turnout_activate"):
        getattr(other, name).argtypes = getattr(here, name).argtypes
    monkeypatch.setattr(native, "library", lambda: other)
    levels = [wanted for wanted in range(len(native.LEVELS)) if other.turnout_bf16_force(wanted)]
    assert levels[0] == 0
    for dtype in HALVES:
        for shape in ((96, 64), (70, 100), (33, 7)):
            made_here, exact = layer(shape, dtype, True)
            x = torch.randn(35, shape[1]).to(dtype)
            want = x.double() @ exact[:, :-1].t() + exact[:, -1]
            for wanted in levels:
                other.turnout_bf16_force(wanted)
                whole = made_here(x.float())
                assert (whole.double() - want).abs().max() <= 1e-5 * want.abs().max()
                assert torch.equal(made_here(x[7:8].float()), whole[7:8])
    for dtype in FLOATS:
        x = torch.randn(5, 70).to(dtype)
        norm = torch.empty_like(x)
        weight = torch.randn(70)
        other.turnout_rms_norm(
            x.data_ptr(), weight.data_ptr(), norm.data_ptr(), 5, 70, 1e-5, 1.0, FLOATS.index(dtype), 2
        )
        wide = x.double()
        want = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight.double() + 1)
        torch.testing.assert_close(norm, want.to(dtype))
        for activation, function in ((0, F.silu), (1, lambda gate: F.gelu(gate, approximate="tanh"))):
            out = torch.empty(5, 35, dtype=dtype)
            other.turnout_activate(x.data_ptr(), out.data_ptr(), 5, 35, FLOATS.index(dtype), activation, 1)
            torch.testing.assert_close(out, (function(wide[:, :35]) * wide[:, 35:]).to(dtype), atol=1e-6, rtol=1e-2)
