"""What watching costs a step: nothing, the step log, the step log and a recording. Run with `make bench`; times are
shown, never asserted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from turnout.core import Request, Sampling
from turnout.core.engine import Engine
from turnout.core.hooks import new_hooks
from turnout.core.types import Result, Step
from turnout.plugins.scheduler import FCFS
from turnout.server.steplog.log import StepLog
from turnout.server.steplog.record import Recorder
from turnout.testing import make_engine

pytestmark = pytest.mark.slow

ID = "0123456789abcdef0123456789abcde"  # as long as a server's


class Constant:
    """A runner that costs nothing."""

    def run(self, step: Step) -> Result:
        return Result([7 for chunk in step.chunks if chunk.samples])


def decoding(num_running: int, watch: str, path: Path) -> Engine:
    """An engine in which `num_running` requests decode, with somebody waiting for a seat."""
    hooks = new_hooks()
    recorder = Recorder(str(path), 2**40) if watch == "recorded" else None
    for listener in (StepLog() if watch != "alone" else None, recorder):
        if listener is not None:
            hooks.register(listener)
    engine = make_engine(
        FCFS(),
        num_blocks=num_running * 600,
        block_size=16,
        max_num_batched_tokens=65_536,
        max_num_seqs=num_running,
        max_model_len=9_600,
        hooks=hooks,
    )
    engine._runner = Constant()
    if recorder is not None:
        recorder.begin(engine.info)
        engine.recorder = recorder  # type: ignore[attr-defined]
    dice = random.Random(0)
    for i in range(num_running + 1):
        prompt = [dice.randrange(16) for _ in range(32)]
        engine.add(Request(f"{ID}-{i}", prompt, Sampling(0, max_tokens=9_000)))
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.benchmark(group="watching a step")
@pytest.mark.parametrize("num_running", [1, 16, 256])
@pytest.mark.parametrize("watch", ["alone", "logged", "recorded"])
def test_cost_of_a_watched_step(benchmark: Any, watch: str, num_running: int, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = decoding(num_running, watch, path)
    benchmark.pedantic(engine.step, rounds=300, warmup_rounds=20)
    if watch == "recorded":
        engine.recorder.close()  # type: ignore[attr-defined]
        benchmark.extra_info["bytes_per_step"] = len(path.read_text().splitlines()[-1])
