"""What the engine itself costs: schedule, draft, batch building, sampling bookkeeping and accounting, the model replaced
by a constant. Run with `make bench`; times are shown, never asserted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec, Request, Sampling
from turnout.core.engine import Engine
from turnout.plugins.runner import LocalRunner
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import make_engine

pytestmark = pytest.mark.slow

LAYER = LayerSpec(1, 1, 8, 1.0)


class Nothing:
    """An attention backend that stores and computes nothing."""

    capabilities = Capabilities()

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        return [torch.zeros(spec.num_blocks, 1)]

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> None: ...

    def run(self, *args: Any) -> Tensor:
        raise AssertionError("the constant model calls no attention")


class Constant:
    """A model that says token 7 without looking."""

    def __init__(self) -> None:
        self.logits = torch.zeros(4096, 16)
        self.logits[:, 7] = 1.0

    def __call__(self, tokens: Tensor, positions: Tensor, logit_rows: Tensor, attend: Any) -> Tensor:
        return self.logits[: len(logit_rows)]


def running_engine(scheduler: FCFS | ChunkedPrefill, num_running: int) -> Engine:
    """An engine in which `num_running` requests decode, with room for thousands of steps."""
    engine = make_engine(
        scheduler,
        num_blocks=num_running * 600,
        block_size=16,
        max_num_batched_tokens=65_536,
        max_num_seqs=num_running,
        max_model_len=9_600,
    )
    spec = KVSpec((LAYER,), 16, num_running * 600)
    engine._runner = runner = LocalRunner()
    runner.start(Constant(), Nothing(), spec, torch.float32, torch.device("cpu"), 0)
    dice = random.Random(0)
    for i in range(num_running):
        prompt = [dice.randrange(16) for _ in range(32)]
        engine.add(Request(str(i), prompt, Sampling(0, max_tokens=9_000)))
    while engine.waiting or any(r.num_pending > 1 or not r.num_generated for r in engine.running):
        engine.step()
    return engine


@pytest.fixture(params=[1, 16, 256, 1024])
def num_running(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.benchmark(group="engine step")
@pytest.mark.parametrize("scheduler", [FCFS(), ChunkedPrefill()], ids=["fcfs", "chunked_prefill"])
def test_cost_of_a_step(benchmark: Any, scheduler: FCFS | ChunkedPrefill, num_running: int) -> None:
    engine = running_engine(scheduler, num_running)
    outputs = benchmark.pedantic(engine.step, rounds=100, warmup_rounds=10)
    assert len(outputs) == num_running
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_running_request"] = benchmark.stats["median"] * 1e6 / num_running
