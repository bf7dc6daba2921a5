"""Which floating-point type a model is served in, where, and what the user is told about it."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from grids import every

from turnout.core import ModelError
from turnout.plugins.loader.dtypes import cpu_units, pick_device, pick_dtype
from turnout.plugins.loader.model import inspect, load
from turnout.plugins.quant.none import Unquantized

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@every(
    ("stored", "quantized", "device", "units", "chosen", "why"),
    [
        (torch.float32, False, CPU, "", torch.float32, "checkpoint's own"),
        (torch.float64, False, CPU, "", torch.float64, "checkpoint's own"),
        (torch.bfloat16, False, CPU, "bfloat16", torch.bfloat16, "checkpoint's own"),
        (torch.bfloat16, False, CPU, "", torch.float32, "the checkpoint is bfloat16, and this cpu has no units for it"),
        (torch.bfloat16, False, CPU, "native", torch.bfloat16, "the native kernels widen it on the way"),
        (torch.float16, False, CPU, "bfloat16", torch.float32, "the checkpoint is float16, and this cpu has no units"),
        (torch.float16, False, CPU, "bfloat16 native", torch.float16, "reads half of float32's bytes"),
        (torch.float16, True, CPU, "bfloat16 native", torch.float32, "the checkpoint is float16"),
        (torch.float16, False, GPU, "float16", torch.float16, "checkpoint's own"),
        (torch.bfloat16, False, GPU, "float16 bfloat16", torch.bfloat16, "checkpoint's own"),
        (torch.bfloat16, False, GPU, "float16", torch.float32, "this cuda has no units for it"),
    ],
)
def test_auto_is_the_checkpoints_type_unless_it_would_be_slower_than_float32(
    stored: torch.dtype, quantized: bool, device: torch.device, units: str, chosen: torch.dtype, why: str
) -> None:
    dtype, reason = pick_dtype("auto", stored, device, quantized, frozenset(units.split()))
    assert dtype == chosen
    assert reason.startswith(str(chosen).removeprefix("torch.")) and why in reason


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16", "float64"])
def test_a_named_type_is_obeyed(asked: str) -> None:
    dtype, reason = pick_dtype(asked, torch.bfloat16, CPU)
    assert str(dtype) == f"torch.{asked}" and reason == f"dtype={asked} was asked for"


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match="dtype=int8 is unknown; choose auto, float32, bfloat16, float16, float64"):
        pick_dtype("int8", torch.float32, CPU)
    with pytest.raises(ModelError, match="float8_e4m3fn, which can't be computed in; name one"):
        pick_dtype("auto", torch.float8_e4m3fn, CPU)


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        ("fpu avx2 avx512f avx512_bf16", True),
        ("fpu amx_bf16 amx_tile", True),
        ("fpu avx2 avx512f", False),
        ("fp asimd bf16", True),
        ("", False),  # flags that can't be read
    ],
)
def test_bfloat16_units_are_read_from_the_cpus_flags(flags: str, units: bool) -> None:
    assert cpu_units(frozenset(flags.split()), False) == ({"bfloat16"} if units else set())
    assert cpu_units(frozenset(flags.split()), True) == ({"bfloat16", "native"} if units else {"native"})


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:0")
    assert (pick_device("cuda:1"), pick_device("cpu")) == (torch.device("cuda:1"), CPU)
    with pytest.raises(ModelError, match="device=cuda:2 is not there: torch sees 2 CUDA devices"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU
    with pytest.raises(ModelError, match="device=cuda is not there: torch sees 0 CUDA devices"):
        pick_device("cuda")


@pytest.mark.parametrize("asked", ["tpu", "meta", "cuda:x", ""])
def test_an_unknown_device_is_refused(asked: str) -> None:
    with pytest.raises(ModelError, match="is unknown; choose auto, cpu, cuda or cuda:N"):
        pick_device(asked)


def test_the_checkpoints_type_is_what_its_configuration_says_or_else_what_its_tensors_are(tmp_path: Path) -> None:
    folder = models.save("llama", tmp_path, dtype=torch.float64)
    assert inspect(str(folder), device="cpu").dtype == torch.float64
    models.edit_config(folder, dtype=None, torch_dtype="float32")  # the key's older name
    assert inspect(str(folder), device="cpu").dtype == torch.float32
    models.edit_config(folder, torch_dtype=None)
    assert inspect(str(folder), device="cpu").dtype == torch.float64


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_served_in_the_type_chosen_whatever_they_are_stored_in(stored: torch.dtype, tmp_path: Path) -> None:
    info = inspect(str(models.save("llama", tmp_path, dtype=stored)), dtype="bfloat16", device="cpu")
    assert {tensor.dtype for tensor in load(info, Unquantized())._net.parameters()} == {torch.bfloat16}


def test_tensors_a_model_keeps_in_float32_are_those_transformers_keeps(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(models.save("deepseek_v3", tmp_path))
    ours = load(inspect(folder, dtype="bfloat16", device="cpu"), Unquantized())._net.state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    kept = {name: tensor.dtype for name, tensor in ours.items() if name in theirs}
    assert kept == {name: theirs[name].dtype for name in kept} and torch.float32 in kept.values()
    assert {tensor.dtype for name, tensor in ours.items() if name not in theirs} == {torch.bfloat16}  # packed
