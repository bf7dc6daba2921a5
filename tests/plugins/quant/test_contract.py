"""Our quantizers under the contract: those that take floats layer by layer, the others on small checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnout.compose import plugins
from turnout.plugins.quant.fp8 import Fp8
from turnout.plugins.quant.int8 import Int8
from turnout.plugins.quant.none import Unquantized
from turnout.testing import QuantizerContract

FIXTURES = sorted(folder.parent for folder in (Path(__file__).parent / "fixtures").glob("*/config.json"))


class TestUnquantized(QuantizerContract):
    make = Unquantized
    bits = 32


class TestInt8(QuantizerContract):
    make = Int8
    bits = 8


class TestInt8Anywhere(QuantizerContract):
    make = staticmethod(lambda: Int8(kernel="torch"))
    bits = 8


class TestFp8(QuantizerContract):
    make = Fp8
    bits = 8


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_a_checkpoint_says_what_its_layers_dequantize_to(folder: Path) -> None:
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    found = plugins.load()
    (reader,) = [
        choice.component
        for name in found.names("quant")
        if method in getattr((choice := found.get("quant", name)).component, "checkpoint_formats", ())
    ]
    about: dict[str, Any] = {"make": reader, "checkpoint": folder}
    type("Suite", (QuantizerContract,), about)().test_a_checkpoint_says_what_its_layers_dequantize_to()


def test_every_reader_of_ours_has_a_checkpoint_among_them() -> None:
    found = plugins.load()
    formats = {
        f for n in found.names("quant") for f in getattr(found.get("quant", n).component, "checkpoint_formats", ())
    }
    tried = {
        json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] for folder in FIXTURES
    }
    assert formats - tried <= {"gguf"}, "gguf is read from single files, elsewhere"
