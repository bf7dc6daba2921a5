"""The configuration of a model in a .gguf file. Knows the file's metadata, not its weights' meaning or its text.

Strict on purpose: whatever metadata would change the computation is carried over or refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from turnout.plugins.formats.gguf.reader import Reader

LLAMA31_CONTEXT = 8192  # the length Llama 3.1's rotary scaling starts from; files keep its factors, not this number
ROPE_FREQS = "rope_freqs.weight"
LONGROPE_TENSORS = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})
ROPE_TENSORS = LONGROPE_TENSORS | {ROPE_FREQS}

_DECODER = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GPT2 = {
    "context_length": "n_positions",
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


class Architecture(NamedTuple):
    """How one `general.architecture` becomes a transformers configuration."""

    model_type: str
    keys: Mapping[str, str]  # metadata key, without the architecture's prefix -> configuration field


ARCHITECTURES = {
    "gemma2": Architecture("gemma2", _DECODER | _WINDOW | _SOFTCAPS),
    "gemma3": Architecture("gemma3_text", _DECODER | _WINDOW | _SOFTCAPS),
    "gpt2": Architecture("gpt2", _GPT2),
    "llama": Architecture("llama", _DECODER | _WINDOW),
    "phi3": Architecture("phi3", _DECODER | _WINDOW),
    "qwen2": Architecture("qwen2", _DECODER),
    "qwen3": Architecture("qwen3", _DECODER),
    "qwen3moe": Architecture("qwen3_moe", _DECODER | _EXPERTS),
    "starcoder2": Architecture("starcoder2", _DECODER | {"attention.layer_norm_epsilon": "norm_epsilon"}),
}
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_READ_APART = (
    {"vocab_size", "tensor_data_layout", "attention.causal", "attention.value_length", "rope.scale_linear"}
    | {f"rope.{name}" for name in ("freq_base", "freq_base_swa", "dimension_count")}
    | {f"rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "finetuned", *_YARN)}
)


def configuration(file: Reader, progress: Callable[[str], None]) -> Any:
    from transformers import AutoConfig

    if file.arch not in ARCHITECTURES:
        raise ValueError(f"its architecture is {file.arch!r}; these can be served: {', '.join(sorted(ARCHITECTURES))}")
    _refuse_unmapped(file, progress)
    model_type, keys = ARCHITECTURES[file.arch]
    fields: dict[str, Any] = {name: file.own(key) for key, name in keys.items() if file.own(key) is not None}
    if lists := [name for name, value in fields.items() if isinstance(value, list)]:
        raise ValueError(f"it gives {', '.join(lists)} layer by layer; such models can't be served")
    if file.arch == "llama" and "sliding_window" in fields:
        model_type = "mistral"
    for field, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"{field}_token_id"] = file.get(f"tokenizer.ggml.{key}_token_id")
    fields["vocab_size"] = int(file.tensors["token_embd.weight"].shape[-1])
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    if file.arch != "gpt2":
        _add_attention(file, fields)
        fields["rope_parameters"] = rope = _rope(file, fields)
        if file.arch == "phi3" and "original_max_position_embeddings" in rope:  # its class looks for it beside
            fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return AutoConfig.for_model(model_type, **fields)


def _add_attention(file: Reader, fields: dict[str, Any]) -> None:
    """What a decoder's file leaves to the reader: head sizes, biases, scales."""
    heads = fields["num_attention_heads"]
    head_dim = fields.setdefault("head_dim", fields["hidden_size"] // heads)
    fields.setdefault("num_key_value_heads", heads)
    if file.own("attention.value_length", head_dim) != head_dim:
        raise ValueError("it has value heads of another size than its key heads; it can't be served")
    if file.arch in ("gemma2", "gemma3"):
        largest = fields["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[file.arch]  # the 27B ones scale otherwise
        fields["query_pre_attn_scalar"] = fields["hidden_size"] // heads if largest else head_dim
    if file.arch == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if file.arch == "starcoder2":
        fields["use_bias"] = "blk.0.attn_q.bias" in file.tensors
    if file.arch == "qwen3moe":
        fields["norm_topk_prob"] = True  # GGUF has no key for it: the architecture implies it


def _rope(file: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding, from the metadata and from tensors that hold frequency factors."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.own("rope.freq_base", 10000.0)}
    rotary = file.own("rope.dimension_count", fields["head_dim"])
    if rotary != fields["head_dim"]:
        if file.arch != "phi3":
            raise ValueError(f"it rotates {rotary} of {fields['head_dim']} dimensions; it can't be served")
        rope["partial_rotary_factor"] = rotary / fields["head_dim"]
    scaling = _rope_scaling(file)
    factors = _rope_factors(file, rope["rope_theta"], fields["max_position_embeddings"])
    if scaling and factors:
        raise ValueError(f"it states both {scaling['rope_type']} rotary scaling and frequency factors")
    rope |= scaling or factors
    if file.arch == "gemma3":
        local = {"rope_type": "default", "rope_theta": file.own("rope.freq_base_swa", 10000.0)}
        return {"full_attention": rope, "sliding_attention": local}
    return rope


def _rope_scaling(file: Reader) -> dict[str, Any]:
    kind = file.own("rope.scaling.type", "linear")  # a factor alone means linear
    factor = file.own("rope.scaling.factor", file.own("rope.scale_linear", 0.0))
    if kind == "longrope" and file.arch == "phi3" and file.tensors.keys() >= LONGROPE_TENSORS:
        return {}  # the tensors say it all
    if file.own("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ValueError(f"it states an attention factor with rotary scaling {kind!r}")
    if kind == "none" or (kind != "longrope" and factor in (0.0, 1.0)):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        stated = {name: file.own(f"rope.scaling.{key}") for key, name in _YARN.items()}
        return {"rope_type": "yarn", "factor": factor} | {name: v for name, v in stated.items() if v is not None}
    raise ValueError(f"it states rotary scaling {kind!r}; known: linear, yarn, and longrope with phi3's factors")


def _rope_factors(file: Reader, theta: float, context: int) -> dict[str, Any]:
    """Each rotary frequency is divided by a factor the file holds as a tensor."""
    found = {name: file.array(name).ravel().tolist() for name in ROPE_TENSORS & file.tensors.keys()}
    single = found.get(ROPE_FREQS, [])
    if all(factor == 1.0 for factor in single) and not found.keys() - {ROPE_FREQS}:
        return {}
    expected = _llama3_factors(max(single, default=1.0), theta, len(single))
    if single and all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(single, expected, strict=True)):
        return {
            "rope_type": "llama3",
            "factor": max(single),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": LLAMA31_CONTEXT,
        }
    original = context if single else file.own("rope.scaling.original_context_length", context)
    return {
        "rope_type": "longrope",
        "factor": context / original,
        "short_factor": single or found["rope_factors_short.weight"],
        "long_factor": single or found["rope_factors_long.weight"],
        "original_max_position_embeddings": original,
        "attention_factor": file.own("rope.scaling.attn_factor", 1.0),
    }


def _llama3_factors(factor: float, theta: float, count: int) -> list[float]:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    result = []
    for index in range(count):
        turns = LLAMA31_CONTEXT / (2 * math.pi * theta ** (index / count))
        kept = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        result.append(1.0 / ((1.0 - kept) / factor + kept))
    return result


def _refuse_unmapped(file: Reader, progress: Callable[[str], None]) -> None:
    """Metadata of the architecture that GGUF gives a meaning must be mapped; what it has no name for is reported."""
    handled = ARCHITECTURES[file.arch].keys.keys() | _READ_APART
    if not file.own("attention.causal", True):
        raise ValueError("it holds a model that isn't causal; only causal language models can be served")
    named, refused = _named_keys(), []
    for key in file.own_keys():
        value = file.own(key)
        if key in handled or not value:
            continue
        if key in named:
            refused.append(f"{file.arch}.{key} = {value}")
        else:
            progress(f"ignoring unknown metadata {file.arch}.{key} = {value}")
    if refused:
        raise ValueError(f"it asks for what can't be honoured: {'; '.join(refused)}")


def _named_keys() -> set[str]:
    """Every key the GGUF format has for an architecture, without the architecture's name."""
    from gguf.constants import Keys

    groups = [group for group in vars(Keys).values() if isinstance(group, type)]
    values = [value for group in groups for value in vars(group).values() if isinstance(value, str)]
    return {value.removeprefix("{arch}.") for value in values if value.startswith("{arch}.")}
