"""`turnout quantize`: what it writes is what it promises, an interruption costs one file, and wrong wishes are explained."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import models
import packing
import pytest
import torch
from grids import every
from safetensors.torch import load_file

from turnout.compose import plugins
from turnout.lab.quantize import folder
from turnout.lab.quantize.config import QuantizeConfig
from turnout.lab.quantize.rounding import Rounding, words
from turnout.plugins.loader.model import inspect, load
from turnout.server.cli import main

TOKENS = torch.arange(3, 99, 8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("llama", tmp_path_factory.mktemp("llama"), dtype=torch.float16)


def turnout(*args: str) -> int:
    """The exit code of `turnout quantize ARGS`."""
    try:
        main.main(["quantize", *args])
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code
    return 0


def logits(path: Path) -> torch.Tensor:
    """In float32, by what quant=auto takes."""
    info = inspect(str(path), dtype="float32", device="cpu")
    method = "none" if info.quantization is None else info.quantization["quant_method"]
    quantizer: Any = plugins.load().get("quant", method).component()
    if info.quantization is not None:
        quantizer.prepare(info.quantization, info)
    places = torch.arange(len(TOKENS))
    with torch.inference_mode():
        return load(info, quantizer)(TOKENS, places, places, models.dense(info.layers, [len(TOKENS)]))


def config_of(path: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((path / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (("method=int8",), 0.05),
        (("method=fp8",), 0.2),
        (("method=rtn", "bits=8", "group_size=16"), 0.05),
        (("method=rtn", "bits=4", "group_size=16"), 0.6),
        (("method=rtn", "bits=4", "group_size=-1", "symmetric=false"), 0.8),
        (("method=rtn", "bits=3", "group_size=32", "symmetric=false"), 1.5),
    ],
    ids=str,
)
def test_what_it_writes_is_served_and_is_close_to_the_model(
    saved: Path, tmp_path: Path, options: tuple[str, ...], bound: float
) -> None:
    out = tmp_path / "small"
    assert turnout(f"model={saved}", f"out={out}", *options) == 0
    before, after = logits(saved), logits(out)
    assert 0 < (after - before).abs().mean() < bound * before.abs().mean()
    assert not list(out.glob("*.part")) and not (out / folder.STATE).exists()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("method", ["rtn", "int8", "fp8"])
def test_transformers_with_compressed_tensors_reads_the_same_weights(saved: Path, tmp_path: Path, method: str) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    out = tmp_path / "small"
    assert turnout(f"model={saved}", f"out={out}", f"method={method}", *(["group_size=16"] * (method == "rtn"))) == 0
    theirs = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    info = inspect(str(out), dtype="float32", device="cpu")
    quantizer: Any = plugins.load().get("quant", "compressed-tensors").component(kernel="torch")
    quantizer.prepare(info.quantization, info)
    name = "model.layers.1.mlp.down_proj"
    stored = load_file(out / "model.safetensors")
    ours = quantizer.linear(name, {k.rpartition(".")[2]: v for k, v in stored.items() if k.startswith(name)})
    torch.testing.assert_close(
        ours.dequantize(), theirs.get_submodule(name).weight.data, rtol=2e-3, atol=1e-4
    )  # theirs are rounded to the scales' float16


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_weight_is_rounded_to_the_nearest_that_can_be_stored(bits: int, symmetric: bool) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    tensors = Rounding("rtn", bits, 32, symmetric).quantized(weight)
    said = {"format": "pack-quantized"} | Rounding("rtn", bits, 32, symmetric).settings([])
    from turnout.plugins.quant.compressed import CompressedTensors

    layer = packing.read(CompressedTensors(kernel="torch"), said, tensors)
    step = layer.scales.float().repeat_interleave(32, 1)
    near = (layer.dequantize() - weight).abs() <= step * 0.501
    edge = (weight.abs() - weight.view(8, 2, 32).abs().amax(2).repeat_interleave(32, 1)).abs() < 1.01 * step
    assert bool((near | edge).all()) and near.float().mean() > 0.9


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_packed_end_to_end(bits: int) -> None:
    for num in (8, 32, 40, 96):
        codes = torch.randint(0, 1 << bits, (3, num))
        assert torch.equal(words(codes, bits), packing.rows(codes, bits))


def test_a_group_of_zeros_stays_zeros() -> None:
    for rounding in (Rounding("rtn", 4, 32), Rounding("rtn", 4, 32, False), Rounding("int8"), Rounding("fp8")):
        parts = rounding.quantized(torch.zeros(8, 64))
        assert bool(torch.isfinite(parts["weight_scale"]).all()) and bool((parts["weight_scale"] > 0).all())


def test_each_layer_has_scales_of_its_own(tmp_path: Path) -> None:
    """A gate a hundredth the size of the up projection beside it is rounded no worse."""
    up = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for rounding in (Rounding("rtn", 8, 32), Rounding("int8")):
        big, small = rounding.quantized(up)["weight_scale"], rounding.quantized(up * 0.01)["weight_scale"]
        torch.testing.assert_close(small.float(), big.float() * 0.01, rtol=1e-2, atol=0)


def test_layers_to_skip_and_a_tied_head_stay_floats_and_are_listed(tmp_path: Path) -> None:
    source = models.save("llama", tmp_path / "tied", dtype=torch.float16, tie_word_embeddings=True)
    out = tmp_path / "small"
    assert (
        turnout(f"model={source}", f"out={out}", "method=int8", "skip=[down_proj,model.layers.0.self_attn.q_proj]") == 0
    )
    stored = load_file(out / "model.safetensors")
    floats = {name for name, tensor in stored.items() if tensor.dtype == torch.float16 and tensor.ndim == 2}
    assert "model.layers.0.self_attn.q_proj.weight" in floats and "model.layers.2.mlp.down_proj.weight" in floats
    assert stored["model.layers.1.self_attn.q_proj.weight"].dtype == torch.int8
    ignored = config_of(out)["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn.q_proj" in ignored and "lm_head" in ignored and len(ignored) == 5
    logits(out)


def test_it_is_written_file_by_file_and_an_interruption_costs_one(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "small"
    command = (f"model={saved}", "method=int8", "shard_size=20000")
    assert turnout(*command, f"out={whole}") == 0
    quantized, calls = Rounding.quantized, list[int]()

    def interrupted(self: Rounding, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return quantized(self, weight)

    with monkeypatch.context() as patch:
        patch.setattr(Rounding, "quantized", interrupted)
        assert turnout(*command, f"out={out}") == 130
    assert "interrupted; the same command goes on from here" in capsys.readouterr().err
    left = {file.name for file in out.glob("*.safetensors")}
    assert 0 < len(left) < len(list(whole.glob("*.safetensors"))) and not (out / "config.json").exists()
    again = list[int]()
    monkeypatch.setattr(Rounding, "quantized", lambda self, weight: again.append(1) or quantized(self, weight))
    assert turnout(*command, f"out={out}") == 0
    assert len(again) < 21 and "there already: file 1 of" in capsys.readouterr().err
    for file in sorted(whole.iterdir()):
        assert (out / file.name).read_bytes() == file.read_bytes()
    assert torch.equal(logits(out), logits(whole))


def test_an_unfinished_folder_is_gone_on_with_only_by_the_command_that_began_it(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    folder.begin(out, {"method": "int8", "bits": None})
    assert turnout(f"model={saved}", f"out={out}", "method=fp8") == 2
    assert "holds an unfinished model made with method=int8" in capsys.readouterr().err


@every(
    ("options", "reason"),
    [
        ((), "method has no default: write method=VALUE"),
        (("method=squeeze",), "method must be one of rtn, int8, fp8, gptq, awq, got squeeze"),
        (("method=int8", "bits=4"), "bits=4 has no meaning with method=int8; it is for method=rtn"),
        (("method=fp8", "group_size=32"), "group_size=32 has no meaning with method=fp8"),
        (("method=rtn", "calibration=x.txt"), "calibration=x.txt has no meaning with method=rtn"),
        (("method=rtn", "act_order=true"), "act_order=True has no meaning with method=rtn"),
        (("method=rtn", "bits=7"), "bits must be one of 2, 3, 4, 5, 6, 8 with method=rtn, got 7"),
        (("method=awq", "bits=8"), "bits must be one of 4 with method=awq, got 8"),
        (("method=rtn", "group_size=4"), "group_size must be -1 .* got 4"),
        (("method=rtn", "group_size=24"), r"layers.0.\S+: groups of 24 do not divide its 32 inputs"),
        (("method=int8", "shard_size=0"), "shard_size must be at least 1, got 0"),
        (("method=int8", "skip=[nothing]"), "skip: no linear layer is named nothing; there are model.layers.0"),
        (("method=int8", "scheduler=fcfs"), "scheduler"),
        (("method=int8", "out=/no/such/place"), "out=/no/such/place: there is no folder /no/such"),
        (("method=int8", "model=/no/such/model"), "model=/no/such/model does not exist"),
    ],
)
def test_wrong_options_are_explained_and_nothing_is_written(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], reason: str
) -> None:
    out = tmp_path / "small"
    given = [arg for arg in (f"model={saved}", f"out={out}") if not any(arg[:4] == option[:4] for option in options)]
    assert turnout(*given, *options) == 2
    assert re.search(reason, capsys.readouterr().err)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_folder_that_holds_something_is_left_alone(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert turnout(f"model={saved}", f"out={tmp_path}", "method=int8") == 2
    assert "holds something already; name a new folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_quantized_model_is_not_quantized_again(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    assert turnout(f"model={saved}", f"out={out}", "method=int8") == 0
    assert turnout(f"model={out}", f"out={tmp_path / 'smaller'}", "method=int8") == 2
    assert "is quantized already; quantize the model it was made of" in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert turnout("--help") == 0
    shown = capsys.readouterr().out
    for name in QuantizeConfig.__dataclass_fields__:
        assert f"{name}=" in shown


# Methods that fit to text


def test_without_the_library_the_install_command_is_named(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gptqmodel", None)
    for method in ("gptq", "awq"):
        assert turnout(f"model={saved}", f"out={tmp_path / 'small'}", f"method={method}") == 2
        assert "GPTQModel, which is not installed: pip install gptqmodel" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


class Recorded:
    """Stands for GPTQModel: keeps what it is asked for and writes a folder as it would."""

    __spec__ = "it is there"

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.texts: list[str] = []
        self.GPTQModel = self

    def QuantizeConfig(self, **settings: Any) -> dict[str, Any]:
        self.settings = settings
        return settings

    def load(self, source: str, settings: dict[str, Any]) -> Recorded:
        self.source = Path(source)
        return self

    def quantize(self, texts: list[str], batch_size: int) -> None:
        self.texts = texts

    def save(self, out: str) -> None:
        Path(out).mkdir()
        for file in self.source.iterdir():
            (Path(out) / file.name).write_bytes(file.read_bytes())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setitem(sys.modules, "gptqmodel", found)
    return found


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"paragraph {i}\nand its second line" for i in range(12)))
    return file


def test_gptq_is_asked_for_as_the_options_say(saved: Path, tmp_path: Path, library: Recorded, text: Path) -> None:
    out = tmp_path / "small"
    options = ("method=gptq", "bits=3", "group_size=32", "symmetric=false", "act_order=true", "samples=10")
    assert turnout(f"model={saved}", f"out={out}", *options, f"calibration={text}", "skip=[lm_head,down_proj]") == 0
    asked = library.settings
    assert (asked["bits"], asked["group_size"], asked["sym"], asked["desc_act"]) == (3, 32, False, True)
    assert (asked["quant_method"], asked["format"]) == ("gptq", "gptq_v2")
    assert re.match(next(iter(asked["dynamic"])).removeprefix("-:"), "model.layers.0.mlp.down_proj")
    assert library.texts == [f"paragraph {i}\nand its second line" for i in range(10)]
    assert (out / "config.json").is_file() and not (out / "draft").exists() and not (out / folder.STATE).exists()


def test_awq_is_asked_for_with_zero_points_unless_told_otherwise(
    saved: Path, tmp_path: Path, library: Recorded, text: Path
) -> None:
    assert turnout(f"model={saved}", f"out={tmp_path / 'small'}", "method=awq", f"calibration={text}") == 0
    asked = library.settings
    assert (asked["quant_method"], asked["format"], asked["sym"]) == ("awq", "gemm", False)


@pytest.mark.parametrize("what", ["absent", "short", "none"])
def test_calibration_text_that_will_not_do_is_refused_before_anything_is_written(
    saved: Path, tmp_path: Path, library: Recorded, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "text.txt", tmp_path / "small"
    if what == "short":
        file.write_text("one\n\ntwo")
    given = [] if what == "none" else [f"calibration={file}"]
    assert turnout(f"model={saved}", f"out={out}", "method=gptq", *given) == 2
    said = {"absent": "can't be read as text", "short": "has 2 paragraphs", "none": "write calibration=FILE"}[what]
    assert said in capsys.readouterr().err and not out.exists()
