"""A tiny model for quantizers to be tried on, and how far their answers are from the float model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from turnout.core.interfaces import Quantizer
from turnout.core.model import Model, ModelInfo
from turnout.core.optional import PreparedQuantizer
from turnout.core.types import LayerSpec
from turnout.testing.attention import plain_attention

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "attention_bias": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS, LENGTH = 4, 48  # tokens each


class Distance(NamedTuple):
    """How far one model's next-token distributions are from another's, over every position of some prompts."""

    share: float  # mean KL divergence, of that between distributions of unrelated positions: 1 says nothing is left
    flips: float  # share of positions whose likeliest token is another one
    perplexity: float  # of the second model on text of the first, as a multiple of the first's own


def save_tiny(folder: Path, tied: bool, seed: int = 7) -> Path:
    """A Llama of random float32 weights, with biases. Needs transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    net = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    with torch.no_grad():
        for tensor in net.parameters():
            if tensor.ndim == 1:  # else biases are 0 and norms 1, and a lost one would go unseen
                tensor += 0.1 * torch.randn_like(tensor)
    net.save_pretrained(folder)
    torch.set_rng_state(state)
    return folder


def prompts(vocab_size: int, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (LENGTH,), generator=generator) for _ in range(PROMPTS)]


@torch.inference_mode()
def logits_of(model: Model, info: ModelInfo, asked: Sequence[Tensor]) -> Tensor:
    """Float64 [tokens of all prompts, vocab]; each prompt alone."""
    found = []
    for tokens in asked:
        rows, tokens = torch.arange(len(tokens), device=info.device), tokens.to(info.device)
        found.append(model(tokens, rows, rows, _dense(info.layers)).double().cpu())
    return torch.cat(found)


def distance(truth: Tensor, got: Tensor) -> Distance:
    """truth, got: float64 [N, vocab]. Numbers that are no numbers are infinitely far."""
    if not bool(got.isfinite().all()):
        return Distance(float("inf"), 1.0, float("inf"))
    p, q = truth.log_softmax(-1), got.log_softmax(-1)
    apart, own = _kl(p, q), -(p.exp() * p).sum(-1).mean().item()
    unrelated = _kl(p, p.roll(1, 0))
    flips = (p.argmax(-1) != q.argmax(-1)).double().mean().item()
    crossed = -(p.exp() * q).sum(-1).mean().item()
    return Distance(apart / unrelated, flips, float(torch.tensor(crossed - own).exp()))


def load(path: Path, quantizer: Quantizer | None) -> tuple[Model, ModelInfo]:
    """A checkpoint through the loader that is installed, as the engine does it; None: whatever reads floats as they are."""
    from turnout.compose import plugins
    from turnout.core.model import ModelLoader

    found = plugins.load()
    loader: ModelLoader = found.get("loader", found.names("loader")[0]).component()
    info = loader.inspect(str(path), "float32", "cpu")
    made: Any = quantizer or found.get("quant", "none").component()
    if isinstance(made, PreparedQuantizer):
        made.prepare(info.quantization, info)
    return loader.load(info, made, found.formats(), lambda done, total: None), info


def dequantized(quantizer: Quantizer) -> Quantizer:
    """One whose layers are plain ones over what the quantizer's dequantize to: the truth for the model it makes."""
    reads = {"checkpoint_formats": quantizer.checkpoint_formats}
    made: Quantizer = type("Dequantized", (_Dequantized,), reads)(quantizer)
    return made


class _Dequantized:
    checkpoint_formats: ClassVar[frozenset[str]]

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer: Any = quantizer

    def prepare(self, settings: Mapping[str, Any] | None, info: ModelInfo) -> None:
        if isinstance(self._quantizer, PreparedQuantizer):
            self._quantizer.prepare(settings, info)

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        made = self._quantizer.linear(name, tensors)
        if isinstance(made, nn.Linear):
            return made
        weight, bias = made.dequantize().float(), tensors.get("bias")
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            plain.bias = nn.Parameter(bias.float(), requires_grad=False)
        return plain


def _kl(p: Tensor, q: Tensor) -> float:
    return (p.exp() * (p - q)).sum(-1).mean().item()


def _dense(layers: Sequence[LayerSpec]) -> Any:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return plain_attention(q, k, v, layers[layer], sinks)

    return attend
