"""Tiny random models of every architecture the tests prove, and an attention so plain that it is right by inspection."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnout.core.types import LayerSpec

VOCAB = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cohere2": {"head_dim": 16, "sliding_window": 6, "layer_types": MIXED, "logit_scale": 0.5},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": MIXED,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 6, "layer_types": MIXED},
    "glm4": {"head_dim": 16},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": MIXED,
        "num_local_experts": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
        },
    },
    "granite": {
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
    },
    "llama": {},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 6},
}


def config(architecture: str, **options: Any) -> Any:
    """transformers' configuration of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(architecture, **{**COMMON, **ARCHITECTURES.get(architecture, {}), **options})


def save(architecture: str, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write a tiny model with random weights, biases and norms included. `options` go into its configuration."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(7)
    net = AutoModelForCausalLM.from_config(config(architecture, **options), dtype=torch.float32)
    with torch.no_grad():
        for tensor in net.parameters():
            if tensor.ndim == 1:  # else every bias is 0 and every norm 1, and mixing them up would go unseen
                tensor += 0.1 * torch.randn_like(tensor)
    net.to(dtype).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None drops one."""
    file = folder / "config.json"
    plain = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in plain.items() if value is not None}))


def reference(folder: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' own logits [T, vocab] of one prompt alone, with its plain attention."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        logits: Tensor = net(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def dense(layers: Sequence[LayerSpec], lengths: Sequence[int]) -> Callable[..., Tensor]:
    """Attention over prompts laid end to end, each seeing itself only, from its first token on. No cache."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        spec, outputs = layers[layer], []
        assert q.shape[1:] == (spec.num_heads, spec.head_dim) and k.shape[1:] == (spec.num_kv_heads, spec.head_dim)
        assert v.shape[1:] == (spec.num_kv_heads, spec.v_head_dim or spec.head_dim)
        assert (sinks is not None) == spec.sinks
        for queries, keys, values in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            outputs.append(_one(spec, queries, keys, values, sinks))
        return torch.cat(outputs)

    return attend


def _one(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    group = spec.num_heads // spec.num_kv_heads
    k, v = (tensor.double().repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    row, column = torch.arange(len(q))[:, None], torch.arange(len(q))[None]
    hidden = column > row
    if spec.window is not None:
        hidden |= column <= row - spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
