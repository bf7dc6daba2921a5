"""Faults other engines had with files of models: quantized ones read as if they were not, headers that lie, odd settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnout.compose import plugins
from turnout.core import ModelError
from turnout.plugins.loader.model import Info, Model, inspect, load
from turnout.plugins.quant.none import Unquantized

Header = dict[str, Any]
LAYER = "model.layers.0.mlp.up_proj"
NORM, OTHER_NORM = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A tiny llama to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "llama"))


def looked_at(folder: Path, dtype: str = "float32") -> Info:
    return inspect(str(folder), dtype=dtype, device="cpu")


def served(folder: Path) -> Model:
    return load(looked_at(folder), Unquantized())


# Quantized checkpoints for a quantizer that does not read them

GPTQ = {
    f"{LAYER}.qweight": torch.zeros(4, 64, dtype=torch.int32),
    f"{LAYER}.qzeros": torch.zeros(1, 8, dtype=torch.int32),
    f"{LAYER}.scales": torch.zeros(1, 64, dtype=torch.float16),
    f"{LAYER}.g_idx": torch.zeros(32, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("settings", "name", "dtype"),
    [
        ({"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"}, "gptq", "auto"),
        ({"quant_method": "awq", "bits": 4, "group_size": 96}, "awq", "float16"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "q_proj"]}, "fp8", "auto"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors", "bfloat16"),
        ({"bits": 4, "group_size": 64}, "unknown", "float32"),
    ],
)
def test_a_quantized_checkpoint_is_refused_with_its_format_whatever_dtype_was_asked_for(
    folder: Path, settings: dict[str, Any], name: str, dtype: str
) -> None:
    models.edit_config(folder, quantization_config=settings)
    info = looked_at(folder, dtype)
    with pytest.raises(
        ModelError, match=f"quantized as '{name}'.*choose a quantizer that reads it, or an unquantized copy"
    ):
        load(info, Unquantized())


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (GPTQ, rf"it lacks {LAYER}.weight; the model has no place for {LAYER}.g_idx"),
        ({f"{LAYER}.weight": torch.zeros(64, 32, dtype=torch.int8)}, "is stored as torch.int8, the model wants"),
        ({f"{LAYER}.weight": torch.zeros(64, 16, dtype=torch.uint8)}, r"is \[64, 16\], the model wants \[64, 32\]"),
        (
            {
                f"{LAYER}.weight": torch.zeros(64, 32, dtype=torch.float8_e4m3fn),
                f"{LAYER}.weight_scale_inv": torch.ones(1, 1),
            },
            f"no place for {LAYER}.weight_scale_inv",
        ),
    ],
    ids=["packed", "int8", "four bits", "scaled float8"],
)
def test_quantized_tensors_are_refused_though_the_configuration_does_not_mention_them(
    folder: Path, tensors: dict[str, Tensor], reason: str
) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored[f"{LAYER}.weight"]
    save_file(stored | tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=reason):
        served(folder)


# Quantized checkpoints for the one that does

FIXTURES = Path(__file__).parents[1] / "plugins" / "quant" / "fixtures"


@pytest.fixture
def packed(tmp_path: Path) -> Callable[[str], Path]:
    """A copy to spoil of a small checkpoint that others' tools made."""
    return lambda name: Path(shutil.copytree(FIXTURES / name, tmp_path / name))


def logits(folder: Path, dtype: str = "float32") -> Tensor:
    """As quant=auto serves it."""
    info = looked_at(folder, dtype)
    assert info.quantization is not None
    quantizer: Any = plugins.load().get("quant", info.quantization["quant_method"]).component(kernel="torch")
    quantizer.prepare(info.quantization, info)
    places = torch.arange(12)
    with torch.inference_mode():
        return load(info, quantizer)(places + 3, places, places, models.dense(info.layers, [12]))


def change(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    """Replace tensors of a checkpoint; None drops one."""
    stored = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / "model.safetensors")


def relabel(folder: Path, **settings: Any) -> None:
    before = json.loads((folder / "config.json").read_text())["quantization_config"]
    models.edit_config(folder, quantization_config=before | settings)


@pytest.mark.parametrize("label", ["gptq", "gptq_v2", None])
def test_a_symmetric_gptq_checkpoint_gives_the_same_logits_whatever_its_label_says(
    packed: Callable[[str], Path], label: str | None
) -> None:
    folder = packed("gptq-3-g64-sym")
    before = logits(folder)
    relabel(folder, checkpoint_format=label, format=label)
    assert torch.equal(logits(folder), before)


@pytest.mark.parametrize("name", ["awq-gemm-g32", "gptq-4-g32-asym-order", "ct-w4-g64-asym"])
@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "float32"])
def test_a_packed_checkpoint_is_served_in_any_type(packed: Callable[[str], Path], name: str, dtype: str) -> None:
    folder = packed(name)
    truth, found = logits(folder, "float64"), logits(folder, dtype).double()
    bounds = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.4}
    assert (found - truth).abs().max() < bounds[looked_at(folder, dtype).dtype]


def test_a_bias_that_a_packed_layer_lacks_is_missed(packed: Callable[[str], Path]) -> None:
    folder = packed("gptq-8-row-sym")
    change(folder, {"model.layers.0.self_attn.q_proj.bias": None})
    with pytest.raises(ModelError, match="does not fit the model: it lacks model.layers.0.self_attn.q_proj.bias"):
        logits(folder)


def test_a_bias_the_model_has_no_place_for_must_be_zeros(packed: Callable[[str], Path]) -> None:
    folder = packed("gptq-3-g64-sym")
    before, name = logits(folder), f"{LAYER}.bias"
    change(folder, {name: torch.zeros(128)})
    assert torch.equal(logits(folder), before)
    change(folder, {name: torch.ones(128)})
    with pytest.raises(ModelError, match=f"it holds {name}, and the model has no bias there"):
        logits(folder)


def test_a_packed_layer_of_another_size_than_the_models_is_refused(packed: Callable[[str], Path]) -> None:
    folder = packed("awq-gemm-g32")
    stored = load_file(folder / "model.safetensors")
    other = {
        f"{LAYER}.{leaf}": stored[f"model.layers.1.self_attn.k_proj.{leaf}"] for leaf in ("qweight", "qzeros", "scales")
    }
    change(folder, dict(other))
    with pytest.raises(ModelError, match=f"{LAYER} maps 64 inputs to 32 outputs, the model wants 64 to 128"):
        logits(folder)


@pytest.mark.parametrize("leaf", ["qweight", "qzeros", "scales"])
def test_a_packed_layer_that_lacks_a_tensor_is_refused_by_name(packed: Callable[[str], Path], leaf: str) -> None:
    folder = packed("awq-gemm-g32")
    change(folder, {f"{LAYER}.{leaf}": None})
    with pytest.raises(ModelError, match=f"{LAYER} is quantized but lacks"):
        logits(folder)


def test_a_packed_checkpoint_without_one_of_its_files_or_a_part_of_one_is_refused(
    packed: Callable[[str], Path],
) -> None:
    folder = packed("gptq-4-g32-asym-order")
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = {"a.safetensors": sorted(stored)[::2], "b.safetensors": sorted(stored)[1::2]}
    for file, names in halves.items():
        save_file({name: stored[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    logits(folder)
    whole = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match="b.safetensors"):
        logits(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match="b.safetensors"):
        logits(folder)


def test_a_head_stored_packed_is_its_own_though_the_configuration_ties_it(packed: Callable[[str], Path]) -> None:
    folder = packed("gptq-2-g32-asym-v2")
    before = logits(folder)
    models.edit_config(folder, tie_word_embeddings=True)
    assert torch.equal(logits(folder), before)


# Files that are not what they say


def rewrite(file: Path, change: Callable[[Header], object], *, before: bytes = b"") -> None:
    """Change the header of a safetensors file, and put `before` in front of its tensors."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + before + data[end:])


def shift(header: Header, by: int) -> None:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def test_a_rewritten_header_that_is_right_loads(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda header: None)
    served(folder)


@pytest.mark.parametrize(
    ("change", "before"),
    [
        (lambda h: h[NORM].update(data_offsets=h[OTHER_NORM]["data_offsets"]), b""),
        (lambda h: h[NORM].update(data_offsets=[h[NORM]["data_offsets"][0]] * 2), b""),
        (lambda h: h[NORM].update(data_offsets=h[NORM]["data_offsets"][::-1]), b""),
        (lambda h: h[NORM].update(data_offsets=[-128, 0]), b""),
        (lambda h: h[NORM].update(dtype="F16"), b""),
        (lambda h: h[NORM].update(shape=[-32]), b""),
        (lambda h: h.pop(NORM), b""),
        (lambda h: shift(h, 16), bytes(16)),
    ],
    ids=["overlap", "empty", "reversed", "negative", "type", "shape", "hole", "hole at the start"],
)
def test_tensors_that_overlap_leave_holes_or_do_not_fit_their_bytes_are_refused(
    folder: Path, change: Callable[[Header], object], before: bytes
) -> None:
    rewrite(folder / "model.safetensors", change, before=before)
    with pytest.raises(ModelError, match=r"model.safetensors has a header that can't be right"):
        looked_at(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h[NORM].update(data_offsets=[0.0, 128.0]),
        lambda h: h[NORM].update(data_offsets=["0", "128"]),
        lambda h: h[NORM].update(data_offsets=[0, 64, 128]),
        lambda h: h[NORM].update(shape=["32"]),
        lambda h: h[NORM].pop("dtype"),
        lambda h: h.update({NORM: 5}),
    ],
)
def test_a_header_of_another_form_is_refused(folder: Path, change: Callable[[Header], object]) -> None:
    rewrite(folder / "model.safetensors", change)
    with pytest.raises(ModelError, match="has a header that can't be read"):
        looked_at(folder)


def test_a_type_nobody_can_read_is_named_with_those_that_can(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda header: header[NORM].update(dtype="F4"))
    with pytest.raises(ModelError, match="tensors of type F4; only these can be read: F64, F32"):
        looked_at(folder)


@pytest.mark.parametrize("weight_map", [["a"], 5, {"model.norm.weight": 5}, {"model.norm.weight": None}], ids=repr)
def test_an_index_that_names_no_files_is_refused(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"index.json"):
        looked_at(folder)


# Settings

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("key", ["attn_factor", "a_key_of_next_year"])
def test_a_rotary_setting_that_nothing_reads_is_reported(folder: Path, key: str) -> None:
    models.edit_config(folder, rope_parameters=YARN)
    assert looked_at(folder).notes[1:] == ()
    models.edit_config(folder, rope_parameters=YARN | {key: 1.0})
    (note,) = looked_at(folder).notes[1:]
    assert note.startswith("config.json: ") and key in note


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["su", "mrope", "a kind of next year"])
def test_an_unknown_rotary_embedding_is_refused_with_the_known_ones(folder: Path, form: str, kind: str) -> None:
    models.edit_config(folder, **{"rope_parameters": None, form: {"rope_type": kind, "factor": 2.0}})
    with pytest.raises(ModelError, match=f"states rope_type '{kind}'; known are default, linear, .*yarn"):
        looked_at(folder)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear"}, {"rope_type": "llama3", "factor": 8.0}, YARN | {"factor": "4"}, "x"], ids=str
)
def test_a_rotary_setting_that_lacks_or_garbles_a_value_is_refused(folder: Path, rope: Any) -> None:
    models.edit_config(folder, rope_parameters=rope)
    with pytest.raises(ModelError, match=r"config\.json"):
        looked_at(folder)
