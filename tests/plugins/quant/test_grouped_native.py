"""The native kernel of grouped layers: right against float64, for any shape, and with every set of instructions."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from turnout.kernels import cpu as native
from turnout.kernels.cpu import pages
from turnout.plugins.quant import grouped, grouped_native
from turnout.plugins.quant.grouped import Grouped, pack

pytestmark = pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}")

BITS = (2, 3, 4, 5, 6, 8)
SHAPES = [(40, 576, 32), (7, 176, 16), (16, 576, 192), (33, 592, 592), (1, 48, 48), (192, 1536, 128), (5, 96, 96)]


def layer(
    bits: int,
    outs: int,
    ins: int,
    group: int,
    activations: str = "float",
    symmetric: bool = False,
    **more: Tensor | None,
) -> Grouped:
    dice = torch.Generator().manual_seed(bits * ins + outs)
    codes = torch.randint(0, 1 << bits, (outs, ins), dtype=torch.uint8, generator=dice)
    scales = (torch.rand(outs, ins // group, generator=dice) * 0.01 + 0.001).half()
    zeros = torch.full(scales.shape, 1 << (bits - 1))
    if not symmetric:
        zeros = torch.randint(0, 1 << bits, scales.shape, generator=dice)
    offsets = -scales.float() * zeros
    return Grouped(pack(codes, bits), scales, offsets, bits, group, kernel="native", activations=activations, **more)


def inputs(rows: int, ins: int) -> Tensor:
    return torch.randn(rows, ins, generator=torch.Generator().manual_seed(rows))


def rounded(x: Tensor, group: int) -> Tensor:
    """What the kernel makes of its inputs: each block of 32, or 16, as multiples of a 127th of its largest."""
    blocks = x.view(len(x), -1, 16 if group % 32 else 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    return (torch.round(blocks / step) * step).flatten(1)


@pytest.mark.parametrize("bits", BITS)
def test_products_of_floats_are_right(bits: int) -> None:
    for number, shape in enumerate(SHAPES):
        made = layer(bits, *shape, symmetric=(bits + number) % 2 == 0)
        weights = made.dequantize(torch.float64)
        for rows in (1, 3, 15):
            x = inputs(rows, shape[1])
            bound = 1e-6 * (x.double().abs() @ weights.abs().T).amax() + 1e-5 * made.scales.float().amax() * (1 << bits)
            assert bool(((made(x).double() - x.double() @ weights.T).abs() <= bound).all()), (shape, rows)


@pytest.mark.parametrize("bits", BITS)
def test_products_of_rounded_inputs_are_right(bits: int) -> None:
    for number, shape in enumerate(SHAPES):
        made = layer(bits, *shape, "int8", symmetric=(bits + number) % 2 == 0)
        weights = made.dequantize(torch.float64)
        for rows in (1, 3, 15):
            x = inputs(rows, shape[1])
            want = rounded(x, shape[2]).double() @ weights.T
            one_step = (x.abs().amax() / 127) * weights.abs().amax()  # a tie may be rounded either way
            assert bool(((made(x).double() - want).abs() <= one_step * 1.01).all()), (shape, rows)
            assert (made(x).double() - want).abs().mean() < 1e-5 * want.abs().mean() + one_step / 50, (shape, rows)


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_its_neighbours(bits: int, activations: str) -> None:
    made = layer(bits, 40, 576, 32, activations)
    x = inputs(23, 576)
    together = made(x)
    for row in (0, 7, 15, 16, 20, 22):
        assert torch.equal(made(x[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize(("bits", "shape"), list(zip(BITS, SHAPES[1:], strict=True)), ids=str)
def test_laying_codes_out_changes_no_weight_and_takes_no_more_memory(bits: int, shape: tuple[int, int, int]) -> None:
    made = layer(bits, *shape)
    weights, before = made.dequantize(), made.nbytes
    made(inputs(1, shape[1]))
    assert made.arranged is not None
    assert torch.equal(made.dequantize(), weights)
    some = torch.tensor([shape[0] - 1, 0, shape[0] // 2])
    assert torch.equal(made.select(some), weights[some])
    padded = -(-shape[0] // 16) * 16 / shape[0]  # outputs are laid out in sixteens
    assert made.nbytes <= before * padded
    if bits in (5, 6) and shape[1] % 32 == 0:
        assert made.nbytes < before * padded * (bits / 8 + 0.2)


def test_every_code_with_every_zero_point_keeps_its_weight() -> None:
    """Repacking for another kernel is where zero points of asymmetric checkpoints have shifted (GPTQModel#2350)."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 1)
    scales = torch.full((16, 1), 0.5)
    for zero in range(16):
        made = Grouped(pack(codes, 4), scales, -scales * zero, 4, 16, kernel="native")
        want = (torch.arange(16) - zero) * 0.5
        assert torch.equal(made(torch.eye(16)).T, want.repeat(16, 1))
        assert torch.equal(made.dequantize(), want.repeat(16, 1))


def test_offsets_that_say_nothing_new_are_not_kept() -> None:
    symmetric, other = layer(4, 32, 64, 32, symmetric=True), layer(4, 32, 64, 32)
    for made in (symmetric, other):
        made(inputs(1, 64))
    assert symmetric.offsets.numel() == 0 and other.offsets.numel() == 64


def test_a_bias_and_an_order_of_the_inputs_are_seen_to_by_both_entrances() -> None:
    order, bias = torch.randperm(96, generator=torch.Generator().manual_seed(1)), torch.randn(40)
    made = layer(4, 40, 96, 32, bias=bias, order=order)
    x = inputs(5, 96)
    want = x.double() @ made.dequantize(torch.float64).T + bias
    assert torch.allclose(made(x).double(), want, atol=1e-5)
    out = torch.empty(5, 40)
    run = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2)(made.native_product()[0])
    run(made.native_product()[1], x.data_ptr(), out.data_ptr(), 5, 1)
    assert torch.allclose(out.double(), want, atol=1e-5)


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_inputs_that_are_not_finite_are_not_lost(bad: float, activations: str) -> None:
    made, x = layer(4, 16, 64, 32, activations), inputs(3, 64)
    x[1, 40] = bad
    finite = made(x).isfinite()
    assert bool(finite[[0, 2]].all()) and not bool(finite[1].any())


def test_blocks_of_zeros_and_of_tiny_numbers_are_zeros() -> None:
    made = layer(4, 16, 64, 32, "int8")
    assert torch.equal(made(torch.zeros(1, 64)), torch.zeros(1, 16))
    assert bool(made(torch.full((1, 64), 1e-38)).abs().max() < 1e-36)


def test_what_it_cannot_compute_is_said() -> None:
    assert "groups are multiples of 16" in str(grouped.obstacle("native", layer(4, 16, 64, 8), torch.float32))
    assert "float16, not float64" in str(grouped.obstacle("native", layer(4, 16, 64, 32), torch.float64))
    assert grouped.obstacle("native", layer(4, 16, 64, 32), torch.float32) is None
    assert grouped.best(layer(4, 16, 64, 32), torch.float32) == "native"
    assert grouped.best(layer(4, 16, 64, 8), torch.float32) == "torch"


def test_layers_laid_out_already_are_not_joined() -> None:
    both = [layer(4, 16, 64, 32), layer(4, 16, 64, 32)]
    joined = Grouped.joined(both)
    assert joined is not None and torch.equal(joined.dequantize()[16:], both[1].dequantize())
    both[1](inputs(1, 64))
    assert Grouped.joined(both) is None


def test_large_pages_hold_what_they_are_given() -> None:
    made = [pages.settled(torch.arange(n, dtype=torch.int32)) for n in (1, 1000, 3 << 20)]
    assert [len(t) for t in made] == [1, 1000, 3 << 20] and all(t.data_ptr() % 64 == 0 for t in made)
    assert all(torch.equal(t, torch.arange(len(t), dtype=torch.int32)) for t in made)
    assert pages.empty((3, 0), torch.float32).shape == (3, 0)


def instructions() -> Iterator[object]:
    """Each set of instructions that grouped.cpp has a path for, if this processor has it."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    for march, needs in (
        ("x86-64-v2", "sse4_2"),
        ("x86-64-v3", "avx2"),
        ("alderlake", "avx_vnni"),
        ("x86-64-v4", "avx512bw"),
    ):
        skip = pytest.mark.skipif(needs not in flags, reason=f"this processor has no {needs}")
        yield pytest.param(march, marks=skip)


@pytest.mark.slow
@pytest.mark.parametrize("march", list(instructions()))
def test_every_set_of_instructions_is_right(march: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, source = tmp_path / "kernels.so", str(native.FOLDER / "grouped.cpp")
    flags = [flag.replace("-O3", "-O1") for flag in native.FLAGS]
    subprocess.run(
        [str(native.compiler()), *flags, f"-march={march}", "-o", str(made), source], check=True, env=os.environ
    )
    library = ctypes.CDLL(str(made))
    library.turnout_grouped.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2]
    library.turnout_grouped.restype = None
    for bits in BITS:
        for activations in ("int8", "float"):
            ours, theirs = (layer(bits, 40, 176, 16, activations) for _ in range(2))
            x = inputs(11, 176)
            want = ours(x)
            monkeypatch.setattr(grouped_native, "_library", lambda: library)
            got = theirs(x)
            monkeypatch.undo()
            assert (got - want).abs().max() <= 2e-6 * want.abs().max()


def test_a_layer_is_moved_and_saved_like_any_module() -> None:
    made = layer(6, 40, 96, 32)
    made(inputs(1, 96))
    assert {"codes", "above", "scales"} <= made.state_dict().keys() and isinstance(made, nn.Module)
