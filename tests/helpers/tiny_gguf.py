"""Tiny .gguf files of random transformers models, written by the rules of the GGUF format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", SIZES | {"rope_parameters": ROPE}),
    "tied llama": ("llama", "llama", SIZES | {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "llama with biases": (
        "llama",
        "llama",
        SIZES | {"rope_parameters": ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("llama", "mistral", SIZES | {"rope_parameters": ROPE, "sliding_window": 4}),
    "qwen2": ("qwen2", "qwen2", SIZES | {"rope_parameters": ROPE}),
    "qwen3": ("qwen3", "qwen3", SIZES | {"rope_parameters": ROPE}),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        SIZES
        | {"rope_parameters": ROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"norm_topk_prob": True},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        SIZES
        | {"rope_parameters": ROPE, "sliding_window": 4, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        SIZES
        | {"sliding_window": 4, "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "num_hidden_layers": 7}
        | {"rope_parameters": {"full_attention": ROPE, "sliding_attention": LOCAL}},
    ),
    "phi3": (
        "phi3",
        "phi3",
        SIZES | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "sliding_window": 4},
    ),
    "gpt2": (
        "gpt2",
        "gpt2",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}
        | {"layer_norm_epsilon": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "starcoder2": (
        "starcoder2",
        "starcoder2",
        {name: value for name, value in SIZES.items() if name != "rms_norm_eps"}
        | {"rope_parameters": ROPE, "norm_epsilon": 1e-5, "use_bias": True},
    ),
}


def tiny(model_type: str, fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # 64ths survive gemma's + 1 and float16 alike
            parameter.copy_((torch.randn_like(parameter) * 16).round() / 64)
    return model


def metadata(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    stated = {
        "context_length": "max_position_embeddings",
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "n_inner" if arch == "gpt2" else "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.layer_norm_epsilon": "layer_norm_epsilon" if arch == "gpt2" else "norm_epsilon",
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
    for key, name in stated.items():
        value = getattr(config, name, None)
        if isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 1.0)))


def tensors(arch: str, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The model's parameters as the GGUF format has them."""
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", half.numpy()
            continue
        base, _, suffix = (name + ".weight" if name.endswith("down_proj") else name).rpartition(".")
        key = f"{table.get_name(base)}.{suffix}"
        if arch == "llama" and (".attn_q." in key or ".attn_k." in key):
            heads = model.config.num_attention_heads if "attn_q" in key else model.config.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if arch.startswith("gemma") and "norm" in key:
            tensor = tensor + 1
        if arch == "gpt2" and tensor.ndim == 2 and key.startswith("blk."):
            tensor = tensor.T
        yield key, tensor.contiguous().numpy()


def write(path: Path, arch: str, model: Any, **changes: Any) -> Path:
    """`changes`: `extra` tensors, tensors to `drop`, further `meta`data, the matrices' `dtype`, a `tokenizer`."""
    writer = gguf.GGUFWriter(path, arch)
    metadata(writer, arch, model.config)
    for key, value in changes.get("meta", {}).items():
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](key, value)
    for key, value in changes.get("tokenizer", {}).items():
        writer.add_key_value(*(f"tokenizer.{key}", *value))
    for name, array in (dict(tensors(arch, model)) | changes.get("extra", {})).items():
        if name not in changes.get("drop", ()):
            dtype = changes.get("dtype", "f32") if array.ndim > 1 else "f32"
            if dtype == "f32":
                writer.add_tensor(name, array.astype(np.float32))
            else:
                writer.add_tensor(name, gguf.quants.quantize(array, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
