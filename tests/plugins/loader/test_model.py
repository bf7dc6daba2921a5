"""Any causal language model of transformers, served with flat tokens: the same logits as transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import models
import pytest
import torch
from torch import Tensor

from turnout.core.types import LayerSpec
from turnout.kernels.cpu.linear import PackedLinear
from turnout.plugins.loader.model import Info, Model, inspect, load
from turnout.plugins.quant.none import Unquantized

PROMPTS = [[5, 17, 99, 3, 42], [61, 8, 8, 23, 77, 104, 12, 90, 31, 6, 55, 120, 2], [9, 44, 71, 13, 28, 66, 100, 35]]


def served(folder: Path, dtype: str = "float32") -> Model:
    return load(inspect(str(folder), dtype=dtype, device="cpu"), Unquantized())


@torch.inference_mode()
def flat_logits(model: Model, prompts: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> Tensor:
    """Logits of `rows` (all, if None) of the prompts laid end to end in one forward."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])
    wanted = torch.arange(len(tokens)) if rows is None else torch.tensor(rows, dtype=torch.int64)
    return model(tokens, positions, wanted, models.dense(model.info.layers, lengths))


def assert_equal_to_transformers(folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> Info:
    model = served(folder)
    expected = torch.cat([models.reference(folder, prompt) for prompt in prompts])
    logits = flat_logits(model, prompts)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    return model.info


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_three_ragged_prompts_in_one_forward_get_transformers_own_logits(architecture: str, tmp_path: Path) -> None:
    info = assert_equal_to_transformers(models.save(architecture, tmp_path))
    assert len(info.layers) == 3 and info.vocab_size == models.VOCAB and info.max_len == 256
    net = served(tmp_path)._net
    kept = [*net.parameters(), *(tensor for name, tensor in net.named_buffers() if name.endswith((".packed", ".bias")))]
    stored = {tensor.data_ptr(): tensor.numel() for tensor in kept}
    whole = [m for m in net.modules() if isinstance(m, PackedLinear)]  # their last panel may be filled up
    stored |= {m.packed.data_ptr(): m.in_features * m.out_features for m in whole}
    assert info.num_parameters == sum(stored.values())  # a tied head counts, and is kept, once


@pytest.mark.parametrize(
    ("architecture", "window", "other"),
    [
        ("cohere2", [6, None, 6], {}),
        ("deepseek_v3", [None] * 3, {"num_kv_heads": 4, "v_head_dim": 12}),
        ("gemma2", [6, None, 6], {"scale": 24**-0.5, "softcap": 3.0}),
        ("gemma3_text", [6, None, 6], {"scale": 1 / 16}),
        ("gpt_oss", [6, None, 6], {"sinks": True}),
        ("granite", [None] * 3, {"head_dim": 8, "scale": 0.3}),
        ("mistral", [6] * 3, {"head_dim": 8, "scale": 8**-0.5}),
        ("opt", [None] * 3, {"num_kv_heads": 4, "head_dim": 8, "scale": 1.0}),
        ("qwen2", [6, None, 6], {"head_dim": 8, "scale": 8**-0.5}),
        ("qwen3", [None] * 3, {}),
    ],
)
def test_what_layers_need_of_attention_is_learnt_from_the_model(
    architecture: str, window: list[int | None], other: dict[str, float], tmp_path: Path
) -> None:
    common = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25} | other
    expected = tuple(LayerSpec(**common, window=width) for width in window)  # type: ignore[arg-type]
    assert inspect(str(models.save(architecture, tmp_path))).layers == expected


def test_a_window_no_shorter_than_the_context_is_none(tmp_path: Path) -> None:
    info = inspect(str(models.save("mistral", tmp_path, sliding_window=256)))
    assert {layer.window for layer in info.layers} == {None}


def test_logits_come_for_the_rows_asked_for(tmp_path: Path) -> None:
    model = served(models.save("gemma2", tmp_path))
    torch.testing.assert_close(flat_logits(model, PROMPTS, [4, 17]), flat_logits(model, PROMPTS)[[4, 17]])
    assert flat_logits(model, PROMPTS, []).shape == (0, models.VOCAB)


@pytest.mark.parametrize("architecture", ["llama", "stablelm"])
def test_two_models_in_one_process_keep_their_attention_apart(architecture: str, tmp_path: Path) -> None:
    one, other = (served(models.save(architecture, tmp_path / name)) for name in "ab")
    assert one.info.passes_keywords == (architecture == "llama")  # stablelm drops extra arguments on the way
    seen: dict[str, list[int]] = {"one": [], "other": []}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        seen["one"].append(layer)
        if layer == 1:  # the other model runs while this one is on its way
            other(torch.tensor([3]), torch.tensor([0]), torch.tensor([0]), beside)
        return torch.zeros_like(q)

    def beside(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        seen["other"].append(layer)
        return torch.zeros_like(q)

    one(torch.tensor([1, 2]), torch.tensor([0, 1]), torch.tensor([1]), attend)
    assert seen == {"one": [0, 1, 2], "other": [0, 1, 2]}


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_bfloat16_stays_as_close_to_float32_as_transformers_in_bfloat16(architecture: str, tmp_path: Path) -> None:
    folder = models.save(architecture, tmp_path)
    exact = torch.cat([models.reference(folder, prompt) for prompt in PROMPTS])
    theirs = torch.cat([models.reference(folder, prompt, torch.bfloat16) for prompt in PROMPTS]).float()
    ours = flat_logits(served(folder, "bfloat16"), PROMPTS)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).abs().max() <= 2 * (theirs - exact).abs().max()


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt_oss"])
def test_float64_agrees_with_transformers_in_float32(architecture: str, tmp_path: Path) -> None:
    folder = models.save(architecture, tmp_path)
    expected = torch.cat([models.reference(folder, prompt) for prompt in PROMPTS])
    logits = flat_logits(served(folder, "float64"), PROMPTS)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits.float(), expected, atol=2e-5, rtol=1e-5)


def test_biases_named_in_the_configuration_are_used(tmp_path: Path) -> None:
    folder = models.save("llama", tmp_path, attention_bias=True, mlp_bias=True)
    assert_equal_to_transformers(folder)
    assert served(folder)._net.model.layers[0].mlp.down_proj.bias is not None


def test_head_dim_need_not_be_hidden_size_over_heads(tmp_path: Path) -> None:
    info = assert_equal_to_transformers(models.save("llama", tmp_path, head_dim=24))
    assert (info.layers[0].head_dim, info.layers[0].scale) == (24, 24**-0.5)


def test_rope_theta_is_read_in_its_old_and_its_new_place(tmp_path: Path) -> None:
    folder = models.save("llama", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    new = flat_logits(served(folder), PROMPTS)
    models.edit_config(folder, rope_parameters=None, rope_theta=100.0)
    assert torch.equal(flat_logits(served(folder), PROMPTS), new)
    models.edit_config(folder, rope_theta=10000.0)
    assert not torch.allclose(flat_logits(served(folder), PROMPTS), new, atol=1e-3)


def test_the_attention_factor_of_yarn_is_honoured(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = models.save("llama", tmp_path, rope_parameters=yarn)
    assert_equal_to_transformers(folder)
    implied = flat_logits(served(folder), PROMPTS)
    models.edit_config(folder, rope_parameters=yarn | {"attention_factor": 1.0})
    assert_equal_to_transformers(folder)
    assert not torch.allclose(flat_logits(served(folder), PROMPTS), implied, atol=1e-3)


def test_the_language_part_of_a_model_with_images_is_served(tmp_path: Path) -> None:
    text = models.config("gemma3_text").to_dict()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    folder = models.save("gemma3", tmp_path, text_config=text, vision_config=vision, mm_tokens_per_image=1)
    info = assert_equal_to_transformers(folder)
    assert info.architecture == "Gemma3ForConditionalGeneration"
    assert [layer.window for layer in info.layers] == [6, None, 6]


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(("rope", "max_len"), [(LONGROPE, 64), (DYNAMIC, 256)])
def test_rope_that_depends_on_the_length_is_served_up_to_where_it_starts_to(
    rope: dict[str, object], max_len: int, tmp_path: Path
) -> None:
    folder = models.save("llama", tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    info = assert_equal_to_transformers(folder, [*PROMPTS, [7, 11] * (max_len // 2)])
    assert info.max_len == max_len
    assert info.notes[0] == info.dtype_reason
    assert bool(info.notes[1:]) == (max_len < 256) and all("64 of 256" in note for note in info.notes[1:])
