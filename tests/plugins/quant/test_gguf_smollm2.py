"""The demo model, a Q4_1 file, served packed: small, and the greedy tokens of its floats up to near-ties."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from turnout.compose import plugins
from turnout.kernels import cpu as native
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.loader.source import made_of
from turnout.plugins.quant.gguf import Gguf
from turnout.plugins.quant.none import Unquantized

PROMPTS = [[100 + (37 + n) * i % 4000 for i in range(12)] for n in range(2)] + [
    [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767],
    [504, 3575, 282, 4649, 314],
    [3, 17, 9, 41, 5, 28],
]
NEW = 8
NEAR = {"int8": 0.5, "float": 0.002}  # logits between the best two, at most, where tokens may differ

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}"),
]


@pytest.fixture(scope="module")
def floats(smollm2: str) -> Model:
    return load(inspect(smollm2), Unquantized())


def packed(folder: str, activations: str) -> Model:
    info, quantizer = inspect(folder), Gguf(activations=activations)
    quantizer.prepare(info.quantization, info)
    return load(info, quantizer, plugins.load().formats())


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(t.transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


@torch.inference_mode()
def logits(model: Model, tokens: list[int], first: int = 0) -> Tensor:
    places = torch.arange(len(tokens))
    return model(torch.tensor(tokens), places, places[first:], attend)


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_greedy_tokens_are_those_of_the_floats_up_to_near_ties(activations: str, floats: Model, smollm2: str) -> None:
    model = packed(smollm2, activations)
    flips = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(logits(model, tokens, len(tokens) - 1).argmax()))
        want = logits(floats, tokens[:-1], len(prompt) - 1)
        best, second = want.topk(2).values.unbind(-1)
        for place, token in enumerate(tokens[len(prompt) :]):
            if token != int(want[place].argmax()):
                flips.append(float(best[place] - second[place]))
    print(f"{activations}: {len(flips)} of {len(PROMPTS) * NEW} tokens differ, where the best two were {flips} apart")
    assert all(gap < NEAR[activations] for gap in flips)
    assert len(flips) <= len(PROMPTS) * NEW // 10


def test_it_takes_little_more_memory_than_its_file(smollm2: str) -> None:
    net = packed(smollm2, "int8")._net
    held = {t.data_ptr(): t.nbytes for t in (*net.buffers(), *net.parameters()) if t.numel()}
    file = Path(str(made_of(smollm2)))
    tables = 16 << 20  # bytes: the file holds its vocabulary and merges too, and memory rotary tables
    assert file.stat().st_size - tables < sum(held.values()) < 1.03 * file.stat().st_size
