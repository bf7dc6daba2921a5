"""The example package's quantizer, as its own author would test it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from turnout.core import ModelError
from turnout.testing.quant import QuantizerContract

FILE = Path(__file__).parents[3] / "docs" / "example_plugin" / "turnout_example" / "nf4.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nf4", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


nf4 = load()


class TestContract(QuantizerContract):
    make = nf4.NF4


def test_its_levels_are_those_of_the_paper() -> None:
    published = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    published += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    torch.testing.assert_close(nf4.levels(), torch.tensor(published), rtol=0, atol=1e-5)


def test_every_weight_becomes_the_nearest_level() -> None:
    weight = torch.randn(8, 64)
    layer = nf4.NF4(block=32).linear("layer", {"weight": weight})
    scales = weight.view(8, 2, 32).abs().amax(2).repeat_interleave(32, 1)
    nearest = (weight / scales)[..., None].sub(nf4.levels()).abs().amin(-1)
    torch.testing.assert_close((layer.dequantize() - weight).abs(), nearest * scales, rtol=1e-4, atol=1e-6)


def test_it_takes_four_bits_and_a_scale_a_block_and_fits_in_80_lines() -> None:
    layer = nf4.NF4().linear("layer", {"weight": torch.randn(64, 256)})
    assert sum(buffer.nbytes for buffer in layer.buffers()) == 64 * 256 // 2 + 64 * 4 * 4 + 16 * 4
    assert len(FILE.read_text().splitlines()) < 80


def test_a_width_its_blocks_do_not_divide_is_refused_naming_the_layer() -> None:
    with pytest.raises(ModelError, match="up_proj has 96 inputs, which blocks of 64 do not divide"):
        nf4.NF4().linear("up_proj", {"weight": torch.zeros(4, 96)})
    with pytest.raises(ValueError, match="quant.block must be even and at least 2, got 3"):
        nf4.NF4(block=3)
