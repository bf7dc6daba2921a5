"""A model that can't be served correctly is refused with the reason, before its weights are read where that shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from grids import every
from safetensors.torch import save_file

from turnout.core import ModelError
from turnout.plugins.loader.model import inspect, load
from turnout.plugins.quant.none import Unquantized


def folder_of(tmp_path: Path, plain: dict[str, Any]) -> str:
    """A model folder with this config.json and weights nobody looks at."""
    (tmp_path / "config.json").write_text(json.dumps(plain))
    save_file({"unused": torch.zeros(1)}, tmp_path / "model.safetensors")
    return str(tmp_path)


@every(
    ("architecture", "options", "reason"),
    [
        ("bloom", {}, "attention does not go through transformers' AttentionInterface"),
        ("mpt", {}, "attention does not go through transformers' AttentionInterface"),
        ("falcon", {"alibi": True}, "attention does not go through transformers' AttentionInterface"),
        ("t5", {}, "no causal language model for model_type 't5'"),
        ("bart", {}, "attends to an encoder"),
        ("whisper", {}, "attends to an encoder"),
        ("gpt2", {"add_cross_attention": True}, "attends to an encoder"),
        ("marian", {"is_encoder_decoder": False}, "its forward does not take position_ids"),
        ("mamba", {}, "layers of kind linear_attention"),
        ("jamba", {}, "layers of kind linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of kind conv"),
        ("llama4_text", {"attention_chunk_size": 16}, "layers of kind chunked_attention"),
        ("bert", {}, "neither causal nor a causal sliding window"),
        ("llama", {"is_causal": False}, "neither causal nor a causal sliding window"),
        ("diffllama", {}, r"those that call attention are \[0, 0, 1, 1, 2, 2\]; each must, once"),
        ("jetmoe", {}, "a trial run failed"),
        ("llama", {"hidden_size": 30}, "hidden size"),
        ("llama", {"max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_a_model_is_refused_at_inspect_naming_the_reason(
    architecture: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    plain = models.config(architecture).to_dict() | options
    with pytest.raises(ModelError, match=reason):
        inspect(folder_of(tmp_path, plain))


def test_a_mask_that_is_not_what_the_layers_say_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral import modeling_mistral

    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", modeling_mistral.create_causal_mask)
    with pytest.raises(ModelError, match="states a window of 6, but its mask has one of None"):
        inspect(folder_of(tmp_path, models.config("mistral").to_dict()))


def test_an_argument_attention_backends_do_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda *args, **kwargs: forward(*args, **kwargs, bias_table=3))
    with pytest.raises(ModelError, match="layer 0 gives attention bias_table"):
        inspect(folder_of(tmp_path, models.config("llama").to_dict()))


def test_positions_that_do_not_count_from_zero_are_refused_at_load(tmp_path: Path) -> None:
    info = inspect(str(models.save("roberta", tmp_path, is_decoder=True)))
    with pytest.raises(ModelError, match="RobertaForCausalLM .* positions do not count from 0"):
        load(info, Unquantized())


def test_tokens_that_meet_outside_attention_are_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    info = inspect(str(models.save("llama", tmp_path)))
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x + x.roll(1, dims=1)))
    with pytest.raises(ModelError, match="a request's result depends on its neighbours"):
        load(info, Unquantized())


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "of model_type 'llama' is LlamaForCausalLM"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel can't be served"),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
            r"OwnForCausalLM .* code of the checkpoint's own \(auto_map\), which is never run",
        ),
        ({"model_type": "nosuch"}, "transformers .* can't read .*nosuch"),
        ({"vocab_size": "many"}, "can't read .*vocab_size"),
    ],
)
def test_a_configuration_that_is_not_a_language_model_of_transformers_is_refused(
    plain: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        inspect(folder_of(tmp_path, models.config("llama").to_dict() | plain))


def test_code_of_the_checkpoint_is_not_needed_where_transformers_has_the_class(tmp_path: Path) -> None:
    folder = models.save("llama", tmp_path)
    models.edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    assert inspect(str(folder)).architecture == "LlamaForCausalLM"


def test_a_folder_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no config.json"):
        inspect(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match="config.json is not JSON"):
        inspect(str(tmp_path))


@pytest.mark.parametrize("nested", [False, True])
def test_a_quantized_checkpoint_needs_a_quantizer_that_reads_its_format(nested: bool, tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4}
    if nested:
        folder = models.save("gemma3_text", tmp_path)
        plain = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
        }
        plain = models.config("gemma3", text_config=plain, vision_config=vision, mm_tokens_per_image=1).to_dict()
        (folder / "config.json").write_text(json.dumps(plain))
    else:
        folder = models.save("llama", tmp_path)
        models.edit_config(folder, quantization_config=settings)
    info = inspect(str(folder))
    assert info.quantization == settings
    with pytest.raises(ModelError, match="quantized as 'awq', and Unquantized reads unquantized checkpoints only"):
        load(info, Unquantized())
