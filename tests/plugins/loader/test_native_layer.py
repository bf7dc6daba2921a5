"""Decoder layers in native calls: which are recognised, what is said of the others, and 16-bit ones beside transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import VOCAB, dense, edit_config, reference, save

from turnout.kernels import cpu as native
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.loader.native_layer import NativeForward
from turnout.plugins.quant.int8 import Int8
from turnout.plugins.quant.none import Unquantized

pytestmark = pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}")
HALVES = [torch.bfloat16, torch.float16]


def served(folder: Path, dtype: str, quantizer: Unquantized | Int8 | None = None) -> Model:
    return load(inspect(str(folder), dtype, "cpu"), quantizer or Unquantized())


@torch.inference_mode()
def logits(model: Model, *prompts: list[int]) -> list[torch.Tensor]:
    """Of prompts laid end to end, [T, vocab] each."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(tokens))
    return list(model(tokens, positions, rows, dense(model.info.layers, lengths)).split(lengths))


PROMPTS = [[(7 * i + 3 + start) % VOCAB for i in range(length)] for start, length in ((0, 1), (5, 17), (9, 40))]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "granite", "smollm3"])
def test_16_bit_models_err_at_most_twice_as_much_as_transformers_in_that_type(
    arch: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save(arch, tmp_path, dtype=dtype)
    model = served(tmp_path, "auto")
    assert model.info.dtype == dtype
    for prompt, got in zip(PROMPTS, logits(model, *PROMPTS), strict=True):
        assert got.dtype == dtype
        exact = reference(tmp_path, prompt, torch.float64)
        error = (got.double() - exact).norm()
        plain = (reference(tmp_path, prompt, dtype).double() - exact).norm()
        assert error <= 2 * plain + 1e-3 * exact.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_a_requests_bits_are_its_own_whoever_runs_beside_it(arch: str, dtype: str, tmp_path: Path) -> None:
    save(arch, tmp_path)
    model = served(tmp_path, dtype)
    together = logits(model, *PROMPTS)
    for prompt, beside in zip(PROMPTS, together, strict=True):
        assert torch.equal(logits(model, prompt)[0], beside)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "granite"])
def test_recognised_layers_are_counted(arch: str, dtype: str, tmp_path: Path) -> None:
    save(arch, tmp_path)
    model = served(tmp_path, dtype)
    found = [m for m in model._net.modules() if isinstance(m.__dict__.get("forward"), NativeForward)]
    (note,) = model.notes
    assert len(found) == 3 and note.startswith("native layers: 3 of 3 decoder layers")
    assert ("bfloat16 products by" in note) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("arch", "options", "why"),
    [
        ("llama", {"hidden_act": "relu"}, "has an MLP, LlamaMLP, that is no gated one with silu or tanh's gelu"),
        ("olmo2", {}, "is made of mlp, post_attention_layernorm, post_feedforward_layernorm, self_attn"),
        ("mixtral", {}, "has an MLP"),
        ("phi3", {}, "is made of input_layernorm, mlp, post_attention_layernorm, resid_attn_dropout"),
        ("smollm3", {}, "computes something else around its products"),  # every fourth layer does not rotate
    ],
)
def test_why_a_layer_is_not_recognised_is_said(arch: str, options: dict[str, str], why: str, tmp_path: Path) -> None:
    save(arch, tmp_path, **({"num_hidden_layers": 4} if arch == "smollm3" else {}))
    edit_config(tmp_path, **options)
    (note,) = served(tmp_path, "float32").notes
    assert why in note and "are not: " in note


def test_a_layer_with_other_numbers_than_its_kind_is_not_recognised(tmp_path: Path) -> None:
    """What a layer computes around its products is compared, not its class alone."""
    from transformers.models.llama import modeling_llama

    class Doubled(modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, *args: object, **options: object) -> object:
            return 1.01 * super().forward(*args, **options)

    save("llama", tmp_path)
    kept = modeling_llama.LlamaDecoderLayer
    modeling_llama.LlamaDecoderLayer = Doubled
    try:
        for dtype in ("float32", "bfloat16"):
            (note,) = served(tmp_path, dtype).notes
            assert "0 of 3" in note and "3 are not: Doubled computes something else around its products" in note
    finally:
        modeling_llama.LlamaDecoderLayer = kept


def test_a_traced_model_says_that_it_has_none(tmp_path: Path) -> None:
    import dataclasses

    save("llama", tmp_path)
    info = dataclasses.replace(inspect(str(tmp_path), "float32", "cpu"), traced=True)
    assert load(info, Unquantized()).notes == ("native layers: none, the model is traced",)
    (note,) = served(tmp_path, "float64").notes
    assert note == "native layers: none, they compute no float64"


def test_int8_products_stand_in_16_bit_layers(tmp_path: Path) -> None:
    save("llama", tmp_path, dtype=torch.bfloat16)
    wide, narrow = served(tmp_path, "float32", Int8()), served(tmp_path, "bfloat16", Int8())
    assert "3 of 3" in narrow.notes[0]
    for want, got in zip(logits(wide, *PROMPTS), logits(narrow, *PROMPTS), strict=True):
        assert (got.float() - want).norm() <= 0.05 * want.norm()


def test_scratch_memory_is_bounded_and_pieces_change_no_bit(tmp_path: Path) -> None:
    """2,048 rows of a layer are computed in pieces where its scratch would pass the bound."""
    save("llama", tmp_path, hidden_size=64, intermediate_size=4096, num_hidden_layers=1)
    model = served(tmp_path, "float32")
    layer = next(m.__dict__["forward"] for m in model._net.modules() if "forward" in m.__dict__)
    assert 4 * (2 * 64 + 3 * 4096) * 1400 > native.SCRATCH // 2

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: None) -> torch.Tensor:
        return q

    def computed(x: torch.Tensor) -> torch.Tensor:
        angles = torch.ones(1, x.shape[1], 16), torch.zeros(1, x.shape[1], 16)
        made: torch.Tensor = layer(x, attention_mask=None, position_embeddings=angles, turnout_attend=attend)
        return made

    x = torch.randn(1, 1400, 64)
    assert torch.equal(computed(x)[:, 1300:], computed(x[:, 1300:].contiguous()))


def test_integer_products_without_instructions_are_said_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an ARM processor, for one: nothing falls back silently."""
    save("llama", tmp_path)
    assert len(served(tmp_path, "float32", Int8()).notes) == 1 and native.integer_products() != native.PLAIN
    monkeypatch.setattr(native, "integer_products", lambda: native.PLAIN)
    assert "compute in plain C++, slower than floats; quant=none" in served(tmp_path, "float32", Int8()).notes[1]
    assert len(served(tmp_path, "float32").notes) == 1
