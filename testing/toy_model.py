"""A tiny model with real attention, to try runners on, and what it says without a cache. It knows no runner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnout.core.model import Attend, ModelInfo
from turnout.core.types import LayerSpec
from turnout.testing.attention import plain_attention

VOCAB, DIM, MAX_LEN = 61, 16, 96
LAYERS = (LayerSpec(2, 1, 8, 0.5), LayerSpec(2, 1, 8, 0.5, window=5))


class ToyModel:
    """Two layers of attention over embeddings of token and position. Logits are far apart, so a wrong key shows."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(5)

        def table(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=dice)

        self._tokens, self._places, self._head = table(VOCAB, DIM), table(MAX_LEN, DIM), table(DIM, VOCAB)
        self._parts = [(table(DIM, 16), table(DIM, 8), table(DIM, 8), table(16, DIM)) for _ in LAYERS]

    def parameters(self) -> list[Tensor]:
        """For a runner that measures them."""
        return [self._tokens, self._places, self._head, *(part for parts in self._parts for part in parts)]

    def __call__(self, tokens: Tensor, positions: Tensor, logit_rows: Tensor, attend: Attend) -> Tensor:
        x = self._tokens[tokens] + self._places[positions]
        for index, (query, key, value, out) in enumerate(self._parts):
            q, k, v = (x @ query).view(-1, 2, 8), (x @ key).view(-1, 1, 8), (x @ value).view(-1, 1, 8)
            y = x + attend(index, q, k, v, None).flatten(1) @ out
            x = y / y.square().mean(-1, keepdim=True).sqrt()
        return x[logit_rows] @ self._head


def info() -> ModelInfo:
    """What a loader would say of it."""
    device = torch.device("cpu")
    return ModelInfo("", "Toy", LAYERS, MAX_LEN, VOCAB, torch.float32, device, num_parameters=2048)


def logits_after(model: ToyModel, tokens: Sequence[int]) -> Tensor:
    """float32 [len(tokens), VOCAB], each row after the tokens up to it, computed densely."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return plain_attention(q, k, v, LAYERS[layer], sinks)

    rows = torch.arange(len(tokens))
    return model(torch.tensor(tokens), rows, rows, attend)


def greedy(model: ToyModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The likeliest continuation."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_after(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
