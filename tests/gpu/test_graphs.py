"""Decode steps recorded as CUDA graphs: the tokens of eager steps on the same card, by every backend that can refresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_on, outputs_of, words
from models import VOCAB, save

from turnout.compose import plugins
from turnout.core import KVSpec, Request, Sampling
from turnout.core.model import Limits
from turnout.plugins.loader import model as loading
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.runner import LocalRunner
from turnout.plugins.runner.graphs import CudaRecorder

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="CUDA graphs need a GPU, and there is none")]
NUM_BLOCKS, BLOCK_SIZE = 64, 16
ABLE = [
    choice
    for choice in plugins.load().choices.values()
    if choice.slot == "attention"
    and getattr(choice.component, "capabilities", None)
    and choice.component.capabilities.graphs
]


def test_a_recording_computes_with_what_its_buffers_hold_when_it_is_played() -> None:
    device = torch.device("cuda")
    given, out = torch.ones(8, device=device), torch.zeros(8, device=device)
    replay = CudaRecorder(device).record(lambda: out.copy_(given * 3 + 1))
    for value in (2.0, 5.0):
        given.fill_(value)
        replay()
        assert out.tolist() == [value * 3 + 1] * 8


def traffic() -> list[Request]:
    return [
        Request(
            f"r{i}",
            words(2 + 7 * i % 19, i, VOCAB),
            Sampling(temperature=(i % 3) / 2, seed=i, max_tokens=3 + 5 * i % 23),
        )
        for i in range(12)
    ]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("choice", ABLE, ids=[choice.name for choice in ABLE])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_tokens_are_those_of_eager_steps(choice: Any, architecture: str, asynchronous: bool, tmp_path: Path) -> None:
    """In float32, where padding to another batch size hardly rounds otherwise; float16 for a backend without it."""
    sizes = {"head_dim": 64, "hidden_size": 256}
    folder = str(save(architecture, tmp_path, **sizes))
    can = choice.component.capabilities
    dtype = "float32" if can.dtypes is None or torch.float32 in can.dtypes else "float16"
    info = loading.inspect(folder, dtype, "cuda")
    if why := choice.obstacles() + can.refusals(info.layers, BLOCK_SIZE, info.dtype, info.device):
        pytest.skip(f"attention={choice.name}: {'; '.join(why)}")
    model = loading.load(info, Unquantized())
    found = []
    for mode in ("eager", "graphs"):
        engine = engine_on(model, num_blocks=NUM_BLOCKS, max_num_seqs=6, max_num_batched_tokens=64)
        runner = LocalRunner(mode, async_scheduling=asynchronous)
        runner.prepare(info, Limits(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=128), lambda *_: None)
        runner.start(model, choice.component(), KVSpec(info.layers, BLOCK_SIZE, NUM_BLOCKS), info.dtype, info.device, 0)
        engine._runner = runner
        outputs = outputs_of(engine, traffic())
        assert not any(o.error for each in outputs.values() for o in each)
        found.append({rid: [t for o in each for t in o.tokens] for rid, each in outputs.items()})
    assert found[0] == found[1]
