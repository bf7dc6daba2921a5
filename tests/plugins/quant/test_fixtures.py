"""Checkpoints that the tools people use have made (fixtures/remake.py) give the logits of those tools' own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file

from turnout.compose import plugins
from turnout.plugins.loader.model import inspect, load
from turnout.plugins.quant.grouped import Grouped

FOLDERS = sorted(
    folder
    for folder in (Path(__file__).parent / "fixtures").iterdir()
    if folder.name.startswith(("gptq-", "awq-", "ct-")) and folder.is_dir()
)


def logits(folder: Path, dtype: str, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Ours, by the quantizer that says it reads the format; and what came with the fixture."""
    reference = load_file(folder / "reference.safetensors")
    info = inspect(str(folder), dtype=dtype, device="cpu")
    assert info.quantization is not None
    quantizer: Any = plugins.load().get("quant", info.quantization["quant_method"]).component(**options)
    quantizer.prepare(info.quantization, info)
    num = len(reference["tokens"])
    with torch.inference_mode():
        model = load(info, quantizer)
        places = torch.arange(num)
        return model(reference["tokens"], places, places, models.dense(info.layers, [num])), reference


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 3e-6), ("float32", 2e-5)])
def test_a_checkpoint_gives_the_logits_of_its_tools_own_weights_in_float64(
    folder: Path, dtype: str, tolerance: float
) -> None:
    found, reference = logits(folder, dtype, kernel="torch")
    assert (found - reference["logits"]).abs().max() < tolerance  # transformers' norms and softmax are in float32


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_so_it_does_with_the_kernel_that_auto_takes(folder: Path) -> None:
    found, reference = logits(folder, "float32")
    assert (found - reference["logits"]).abs().max() < 2e-5


@pytest.mark.parametrize(
    "folder", [folder for folder in FOLDERS if folder.name.startswith("ct-")], ids=lambda folder: folder.name
)
def test_a_checkpoint_gives_the_logits_transformers_itself_gives_within_the_rounding_of_its_weights(
    folder: Path,
) -> None:
    found, reference = logits(folder, "float32", kernel="torch")  # compressed-tensors rounds weights to float16
    assert (found - reference["transformers"]).abs().max() < 1e-2


def test_a_checkpoint_without_a_wanted_type_is_served_in_one_chosen_by_the_stated_rule() -> None:
    info = inspect(str(FOLDERS[0]), dtype="auto", device="cpu")
    assert info.dtype == torch.float32 and "float16" in info.dtype_reason


def test_packed_layers_stay_packed_and_siblings_share_one_product() -> None:
    folder = next(folder for folder in FOLDERS if folder.name == "awq-gemm-row")
    info = inspect(str(folder), dtype="float32", device="cpu")
    quantizer: Any = plugins.load().get("quant", "awq").component(kernel="torch")
    quantizer.prepare(info.quantization, info)
    net = load(info, quantizer)._net
    packed = [module for module in net.modules() if isinstance(module, Grouped)]
    inside = sum(layer.nbytes for layer in packed)
    weights = sum(layer.in_features * layer.out_features for layer in packed)
    scales = sum(layer.out_features for layer in packed)
    assert weights == 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128)
    assert inside == weights // 2 + scales * (2 + 4)
    assert len(packed) == 2 * 4  # q/k/v, o, gate/up, down of two layers
