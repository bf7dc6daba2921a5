"""GGUF files are converted without loss, or refused with the reason.

The tiny files are written here from random transformers models by the rules of the GGUF format, so the logits of the
converted folder must equal the logits of the model they came from. Token ids were compared with llama.cpp's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFValueType as Kind
from grids import every
from safetensors.torch import load_file
from tiny_gguf import MODELS, ROPE, tiny, write
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from turnout.plugins.formats.gguf import GGUF, weights

IDS = torch.tensor([[3, 17, 9, 41, 5, 28, 33, 2, 60, 11, 7, 50]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def convert(path: Path, reports: list[str] | None = None) -> Path:
    folder = path.with_suffix("")
    folder.mkdir()
    GGUF().convert(path, folder, (reports if reports is not None else []).append)
    return folder


def loaded(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


def llama(**fields: Any) -> Any:
    return tiny("llama", MODELS["llama"][2] | fields)


@pytest.mark.parametrize("case", MODELS)
def test_a_converted_model_computes_what_the_original_did(case: str, tmp_path: Path) -> None:
    arch, model_type, fields = MODELS[case]
    model = tiny(model_type, fields)
    converted = loaded(convert(write(tmp_path / "tiny.gguf", arch, model)))
    assert converted.config.model_type == model_type
    assert torch.equal(logits(converted), logits(model))


def test_gemma2_softcaps_come_from_the_metadata_and_can_be_seen_in_the_logits(tmp_path: Path) -> None:
    model = tiny("gemma2", MODELS["gemma2"][2])
    converted = loaded(convert(write(tmp_path / "tiny.gguf", "gemma2", model)))
    assert converted.config.attn_logit_softcapping == 3.0 and converted.config.final_logit_softcapping == 2.0
    converted.config.final_logit_softcapping = None
    assert not torch.allclose(logits(converted), logits(model), atol=0.01)


@pytest.mark.parametrize(
    ("stated", "rope"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
        ({"type": "none"}, {"rope_type": "default"}),
    ],
)
def test_rotary_scaling_in_the_metadata_is_honoured(
    stated: dict[str, Any], rope: dict[str, Any], tmp_path: Path
) -> None:
    model = llama(rope_parameters=ROPE | rope)
    meta = {f"llama.rope.scaling.{key}": value for key, value in stated.items()}
    converted = loaded(convert(write(tmp_path / "tiny.gguf", "llama", model, meta=meta)))
    assert torch.equal(logits(converted), logits(model))


def test_frequency_factors_of_one_change_nothing(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(8, np.float32)}
    converted = loaded(convert(write(tmp_path / "tiny.gguf", "llama", llama(), extra=extra)))
    assert converted.config.rope_parameters["rope_type"] == "default"
    assert torch.equal(logits(converted), logits(llama()))


def test_frequency_factors_of_llama_3_become_its_rotary_scaling(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    long = {"max_position_embeddings": 65536, "rope_parameters": ROPE | {"rope_theta": 500000.0}}
    scaled = llama(
        **long | {"rope_parameters": long["rope_parameters"] | rope | {"original_max_position_embeddings": 8192}}
    )
    factors = llama(**long).model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
    assert factors.min() == 1.0 and factors.max() == 8.0
    extra = {"rope_freqs.weight": factors.numpy()}
    converted = loaded(convert(write(tmp_path / "tiny.gguf", "llama", scaled, extra=extra)))
    assert converted.config.rope_parameters["rope_type"] == "llama3"
    assert torch.equal(logits(converted), logits(scaled))


def test_any_other_frequency_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = torch.linspace(1.0, 9.0, 8)
    model = llama()
    extra = {"rope_freqs.weight": factors.numpy()}
    converted = loaded(convert(write(tmp_path / "tiny.gguf", "llama", model, extra=extra)))
    model.model.rotary_emb.inv_freq /= factors
    torch.testing.assert_close(logits(converted), logits(model))


def test_phi3_keeps_its_long_and_short_factors(tmp_path: Path) -> None:
    model = tiny("phi3", MODELS["phi3"][2] | {"rope_parameters": ROPE, "hidden_size": 64})
    extra = {
        f"rope_factors_{name}.weight": np.linspace(1, end, 8, dtype=np.float32)
        for name, end in (("long", 9), ("short", 2))
    }
    meta = {
        "phi3.rope.scaling.type": "longrope",
        "phi3.rope.scaling.original_context_length": 8,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    rope = loaded(convert(write(tmp_path / "tiny.gguf", "phi3", model, extra=extra, meta=meta))).config.rope_parameters
    assert rope["rope_type"] == "longrope" and rope["original_max_position_embeddings"] == 8
    assert rope["long_factor"][-1] == 9.0 and rope["short_factor"][-1] == 2.0 and rope["attention_factor"] == 1.25


@pytest.mark.parametrize(("quant", "dtype"), [(Quant.F16, torch.float16), (Quant.BF16, torch.bfloat16)])
def test_half_precision_keeps_its_type(quant: Quant, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = convert(write(tmp_path / "tiny.gguf", "llama", llama(), dtype=quant))
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype is dtype and tensors["model.norm.weight"].dtype is torch.float32
    assert AutoConfig.from_pretrained(folder).dtype is dtype
    assert torch.equal(logits(loaded(folder)), logits(llama()))


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_1])
def test_quantized_tensors_become_the_float32_values_they_stand_for(quant: Quant, tmp_path: Path) -> None:
    model = llama(hidden_size=64, intermediate_size=64, head_dim=32, num_attention_heads=2)
    folder = convert(write(tmp_path / "tiny.gguf", "llama", model, dtype=quant))
    weight = model.lm_head.weight.detach().numpy()
    expected = torch.from_numpy(gguf.dequantize(gguf.quants.quantize(weight, quant), quant))
    converted = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert converted.dtype is torch.float32 and torch.equal(converted, expected)


def test_a_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
    reports: list[str] = []
    folder = convert(write(tmp_path / "tiny.gguf", "llama", llama()), reports)
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert f"converted tiny.gguf: part {len(files)} of {len(files)}" in reports
    assert torch.equal(logits(loaded(folder)), logits(llama()))


def test_metadata_that_no_one_knows_is_reported_and_ignored(tmp_path: Path) -> None:
    reports: list[str] = []
    meta = {"llama.mood": "cheerful", "general.author": "someone"}
    folder = convert(write(tmp_path / "tiny.gguf", "llama", llama(), meta=meta), reports)
    assert "ignoring unknown metadata llama.mood = cheerful" in reports
    assert torch.equal(logits(loaded(folder)), logits(llama()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"meta": {"llama.expert_count": 4}}, "llama.expert_count = 4"),
        ({"meta": {"llama.attn_logit_softcapping": 5.0}}, "llama.attn_logit_softcapping = 5.0"),
        ({"meta": {"llama.attention.causal": False}}, "isn't causal"),
        ({"meta": {"llama.rope.scaling.type": "longrope"}}, "rotary scaling 'longrope'"),
        ({"meta": {"llama.rope.scaling.factor": 2.0, "llama.rope.scaling.attn_factor": 2.0}}, "attention factor"),
        ({"meta": {"llama.rope.scaling.yarn_log_multiplier": 0.5}}, "yarn_log_multiplier"),
        ({"meta": {"split.count": 3}}, "llama-gguf-split --merge"),
        ({"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "no place for: blk.0.attn_sinks.weight"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "lacks tensors .*o_proj.bias"),
        ({"drop": ["blk.1.ffn_up.weight"]}, "lacks tensors .*: model.layers.1.mlp.up_proj.weight"),
        ({"extra": {"output_norm.weight": np.ones(16, np.float32)}}, r"output_norm.weight has shape \(16,\)"),
    ],
)
def test_what_can_not_be_converted_faithfully_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "llama", llama(), **changes)
    with pytest.raises(ValueError, match=reason):
        convert(path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'mamba'; these can be served: gemma2, .*qwen3moe, starcoder2"):
        convert(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("share", [0.0001, 0.05, 0.5, 0.99])
def test_a_file_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "llama", llama())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match="not a readable GGUF file, or was cut short"):
        convert(path)


# Tokenizers

PIECES = ["▁", "h", "e", "l", "o", "w", "r", "d", "▁h", "he", "ll", "llo", "hello", "▁w", "or", "ld", "▁▁"]
SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<end_of_turn>", "<usr>"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 4]
SCORES = [0.0] * 259 + [3.0 * len(piece) - 60.0 - index for index, piece in enumerate(PIECES)] + [-1000.0] * 2
STRINGS = (Kind.ARRAY, Kind.STRING)
BYTES = ["a", "b", "1", "2", "Ġ", "Ċ", "12", "Ġ1", "ab", "Ġab", "Ġb", "ba", "abba"]
BYTE_MERGES = ["a b", "1 2", "Ġ 1", "Ġ ab", "Ġ b", "b a"]


def sentencepiece(**changes: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    return {
        "ggml.model": ("llama", Kind.STRING),
        "ggml.tokens": (SENTENCEPIECE, *STRINGS),
        "ggml.scores": (SCORES, Kind.ARRAY, Kind.FLOAT32),
        "ggml.token_type": (TYPES, Kind.ARRAY, Kind.INT32),
        "ggml.bos_token_id": (1, Kind.UINT32),
        "ggml.eos_token_id": (2, Kind.UINT32),
        "ggml.unknown_token_id": (0, Kind.UINT32),
    } | {f"ggml.{key}": value for key, value in changes.items()}


def byte_level(pre: str, **changes: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    tokens = ["<|begin|>", "<|im_end|>", *BYTES]
    return {
        "ggml.model": ("gpt2", Kind.STRING),
        "ggml.pre": (pre, Kind.STRING),
        "ggml.tokens": (tokens, *STRINGS),
        "ggml.merges": (BYTE_MERGES, *STRINGS),
        "ggml.token_type": ([3, 3, *[1] * len(BYTES)], Kind.ARRAY, Kind.INT32),
        "ggml.bos_token_id": (0, Kind.UINT32),
        "chat_template": ("{{ messages[0].content }}!", Kind.STRING),
    } | {f"ggml.{key}": value for key, value in changes.items()}


def tokenizer(tmp_path: Path, vocabulary: dict[str, tuple[Any, ...]], arch: str = "llama") -> Any:
    _, model_type, fields = MODELS[arch]
    size = len(vocabulary["ggml.tokens"][0])
    folder = convert(
        write(tmp_path / "t.gguf", arch, tiny(model_type, fields | {"vocab_size": size}), tokenizer=vocabulary)
    )
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("prefix", "text", "tokens"),
    [
        (True, "hello world", "<s> ▁h e llo ▁w or ld"),
        (True, "  hello", "<s> ▁▁ ▁h e llo"),
        (True, "hello<end_of_turn>hello", "<s> ▁h e llo <end_of_turn> ▁h e llo"),
        (True, "<usr>é", "<s> <usr> ▁ <0xC3> <0xA9>"),
        (False, "hello world", "<s> hello ▁w or ld"),
        (False, "hello<end_of_turn>hello", "<s> hello <end_of_turn> hello"),
        (False, "  hello", "<s> ▁ ▁h e llo"),
    ],
)
def test_a_sentencepiece_vocabulary_splits_text_as_llama_cpp_does(
    prefix: bool, text: str, tokens: str, tmp_path: Path
) -> None:
    converted = tokenizer(tmp_path, sentencepiece(add_space_prefix=(prefix, Kind.BOOL)))
    ids = converted.encode(text)
    assert converted.convert_ids_to_tokens(ids) == tokens.split()
    assert [SENTENCEPIECE[number] for number in ids] == tokens.split()
    if "<" not in text:
        assert converted.decode(ids, skip_special_tokens=True) == text


def test_a_vocabulary_without_the_familys_usual_special_tokens_gets_none_of_them(tmp_path: Path) -> None:
    converted = tokenizer(tmp_path, sentencepiece(), "gemma2")
    assert len(converted) == len(SENTENCEPIECE)
    assert converted.convert_ids_to_tokens(converted.encode("hello")) == ["<s>", "hello"]


def test_no_start_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    converted = tokenizer(tmp_path, sentencepiece(add_bos_token=(False, Kind.BOOL)))
    assert converted.convert_ids_to_tokens(converted.encode("hello")) == ["▁h", "e", "llo"]


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "ab 12", "ab Ġ 1 2"),
        ("gpt-2", "ab 12", "ab Ġ 12"),
        ("qwen2", "ab12 b", "ab 1 2 Ġb"),
        ("gpt-2", "abba", "ab ba"),
        ("llama-bpe", "abba", "<|begin|> abba"),
        ("smollm", "ab<|im_end|>ab", "ab <|im_end|> ab"),
    ],
)
def test_a_byte_level_vocabulary_splits_text_as_the_file_names_it(
    pre: str, text: str, tokens: str, tmp_path: Path
) -> None:
    converted = tokenizer(tmp_path, byte_level(pre))
    assert converted.convert_ids_to_tokens(converted.encode(text)) == tokens.split()


def test_an_unknown_way_of_splitting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="splits text like 'klingon', which isn't known; known: .*smollm"):
        tokenizer(tmp_path, byte_level("klingon"))


def test_template_and_every_token_that_ends_a_turn_survive(tmp_path: Path) -> None:
    vocabulary = byte_level("smollm", eos_token_id=(3, Kind.UINT32), eot_token_id=(4, Kind.UINT32))
    converted = tokenizer(tmp_path, vocabulary)
    message = [{"role": "user", "content": "hi"}]
    assert converted.apply_chat_template(message, tokenize=False) == "hi!"
    assert converted.eos_token == "b" and converted.bos_token == "<|begin|>"
    assert GenerationConfig.from_pretrained(tmp_path / "t").eos_token_id == [3, 4, 1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["<|endoftext|>", "<|im_end|>"], ["<|endoftext|>", "<|im_end|>"]),  # Qwen 2.5
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]),  # Llama 3.1
        (["<end_of_utterance>", "_<EOT>"], ["<end_of_utterance>", "_<EOT>"]),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),  # "<|end|>" ends a part there
        (["<|end|>", "<|endoftext|>"], ["<|end|>", "<|endoftext|>"]),
    ],
)
@pytest.mark.parametrize("kind", [3, 1, 4], ids=["control", "normal", "user defined"])
def test_what_llama_cpp_takes_for_an_end_by_its_name_ends_a_turn_whatever_its_type(
    names: list[str], expected: list[str], kind: int, tmp_path: Path
) -> None:
    tokens = ["<|begin|>", "<|other|>", *BYTES, *names]
    types = [3, 3, *[1] * len(BYTES), *[kind] * len(names)]
    vocabulary = byte_level(
        "smollm", tokens=(tokens, *STRINGS), token_type=(types, Kind.ARRAY, Kind.INT32), eos_token_id=(2, Kind.UINT32)
    )
    converted = tokenizer(tmp_path, vocabulary)
    ends = GenerationConfig.from_pretrained(tmp_path / "t").eos_token_id
    assert ends[0] == 2 and {tokens[end] for end in ends[1:]} == set(expected)
    for name in expected:
        assert converted.encode(f"ab{name}ab", add_special_tokens=False).count(tokens.index(name)) == 1
        assert converted.decode([tokens.index(name)], skip_special_tokens=True) == ""


def test_a_file_without_a_tokenizer_is_converted_and_says_so(tmp_path: Path) -> None:
    reports: list[str] = []
    folder = convert(write(tmp_path / "tiny.gguf", "llama", llama()), reports)
    assert "it holds no tokenizer: prompts can only be token ids" in reports
    assert not (folder / "tokenizer.json").exists()


@every(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("In 1984 it cost $12", [788, 216, 33, 41, 40, 36, 357, 1708, 1885, 33, 34]),
        ("  two  spaces 12\n\n\t5", [216, 827, 216, 5600, 216, 33, 34, 14436, 37]),
        ("def f(x):\n    return x**2 + 10", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 1232, 216, 33, 32]),
        ("你好,世界", [18645, 250, 48392, 138, 28, 7906, 240, 178, 239, 230]),
        ("👩\u200d👧 42", [10813, 235, 119, 321, 231, 10813, 235, 117, 216, 36, 34]),
        ("it's we'll I'm", [269, 506, 392, 3060, 339, 5248]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
        ("½ Ⅻ ١٢", [16738, 216, 173, 223, 121, 216, 164, 111, 164, 112]),
    ],
)
def test_the_demo_model_gets_the_ids_of_llama_cpp(text: str, ids: list[int], smollm2: str) -> None:
    assert AutoTokenizer.from_pretrained(smollm2).encode(text) == ids
