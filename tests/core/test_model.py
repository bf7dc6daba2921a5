"""Any causal language model of transformers, served with flat tokens: the same logits as transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from turnout.core.model import Model, ModelInfo, inspect, load
from turnout.plugins.quant.none import Unquantized

PROMPTS = [[5, 17, 99, 3, 42], [61, 8, 8, 23, 77, 104, 12, 90, 31, 6, 55, 120, 2], [9, 44, 71, 13, 28, 66, 100, 35]]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def served(folder: Path, dtype: str = "float32") -> Model:
    return load(inspect(str(folder), dtype=dtype, device="cpu"), Unquantized())


@torch.inference_mode()
def flat_logits(model: Model, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Logits of every row of the prompts laid end to end in one forward."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return model(tokens, positions, torch.arange(len(tokens)), models.dense(model.info.layers, lengths))


def assert_equal_to_transformers(folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> ModelInfo:
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
