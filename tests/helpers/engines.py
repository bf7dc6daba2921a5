"""Real engines in this process, on tiny models: for tests that go through every layer without a server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from turnout.compose import plugins
from turnout.compose.build import build_engine
from turnout.compose.config import resolve
from turnout.core import BlockManager, Preemption, Request, Scheduler
from turnout.core.engine import Engine
from turnout.core.optional import SharingBlocks
from turnout.core.types import EngineInfo, Finish, KVSpec, Output
from turnout.kernels import cpu as native
from turnout.plugins.attention.cpu import CpuAttention
from turnout.plugins.attention.torch_sdpa import TorchAttention
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.loader.model import Model
from turnout.plugins.preemption import Recompute
from turnout.plugins.runner import LocalRunner
from turnout.plugins.scheduler import FCFS
from turnout.server.engine.beam import ServedEngine
from turnout.server.engine.messages import Asked, BeamSearch, ParallelSampling
from turnout.server.engine.parallel import requests_of
from turnout.testing import make_engine

BACKENDS: dict[str, Callable[[], Any]] = {"torch": TorchAttention, "cpu": CpuAttention}
NO_NATIVE = native.obstacle()
backends = pytest.mark.parametrize(
    "attention",
    ["torch", pytest.param("cpu", marks=pytest.mark.skipif(NO_NATIVE is not None, reason=f"no kernels: {NO_NATIVE}"))],
)


def makers(slot: str, **options: Any) -> dict[str, Callable[[], Any]]:
    """Every component of ours for a slot, made anew by a call; `options` where it has them."""
    return {
        c.name: partial(c.component, **{k: v for k, v in options.items() if any(k == name for name, _, _ in c.options)})
        for c in plugins.load().choices.values()
        if c.slot == slot and c.package == "turnout" and c.name != "auto"
    }


def ours(slot: str, **options: Any) -> Any:
    """A parametrization over them: `scheduler()` makes one."""
    found = makers(slot, **options)
    return pytest.mark.parametrize(slot, list(found.values()), ids=list(found))


def engine_on(
    model: Model,
    scheduler: Scheduler | None = None,
    *,
    attention: str = "torch",
    num_blocks: int = 64,
    block_size: int = 16,
    preemption: Preemption | None = None,
    blocks: BlockManager | None = None,
    prefix_cache: bool = True,
    cache_dtype: str = "auto",
    runner: LocalRunner | None = None,
    **budgets: Any,
) -> Engine:
    """An engine whose runner computes with `model`."""
    policy, made = preemption or Recompute(), runner or LocalRunner()
    manager = blocks or PagedBlocks(block_size, prefix_cache=prefix_cache)
    limits = {"max_num_batched_tokens": 1024, "max_num_seqs": 32, "max_model_len": model.info.max_len} | budgets
    engine = make_engine(
        scheduler or FCFS(),
        num_blocks=num_blocks,
        block_size=block_size,
        preemption=policy,
        blocks=manager,
        runner=lambda *sizes: made,
        **limits,
    )
    engine.info = replace(engine.info, model="tiny", vocab_size=model.info.vocab_size)
    spec = KVSpec(model.info.layers, block_size, num_blocks, cache_dtype)
    device = torch.device("cpu")
    host = policy.num_host_blocks + (manager.num_host_blocks if isinstance(manager, SharingBlocks) else 0)
    made.start(model, BACKENDS[attention](), spec, model.info.dtype, device, host)
    return engine


def composed(folder: Path, *overrides: str) -> Engine:
    """The engine that `turnout serve model=FOLDER …` has."""
    from hydra import compose, initialize_config_module

    import turnout.server.config  # noqa: F401  stores the schemas of the commands

    plugins.load()
    with initialize_config_module("turnout.conf", version_base=None):
        return build_engine(resolve(compose("serve", [f"model='{folder}'", *overrides])))


def words(num: int, seed: int = 0, below: int = 900) -> list[int]:
    """A prompt of `num` token ids, none of them special."""
    dice = random.Random(seed)
    return [dice.randrange(20, below) for _ in range(num)]


def outputs_of(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Output]]:
    """Everything the engine says about the requests, which start together."""
    found: dict[str, list[Output]] = {request.id: [] for request in requests}
    for output in engine.generate(requests):
        found[output.request_id].append(output)
    return found


class LocalEngine:
    """The engine client of the HTTP layer over an engine in this process: it steps whenever the event loop is idle."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._served = ServedEngine(engine)
        self.on_step: Callable[[], None] = lambda: None
        self._streams: dict[str, asyncio.Queue[Output | Exception]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def stats(self) -> Any:
        return self.engine.stats

    def trouble(self) -> str | None:
        return None

    async def generate(self, asked: Asked) -> AsyncIterator[Output]:
        for one in requests_of(asked) if isinstance(asked, ParallelSampling) else (asked,):
            self._served.add(one)
        names = (asked.id,) if isinstance(asked, Request) else asked.answers
        stream: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._streams |= dict.fromkeys(names, stream)
        num_open = len(names)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drive())
        try:
            while num_open:
                output = await stream.get()
                if isinstance(output, Exception):
                    raise output
                num_open -= output.finish is not None
                yield output
        finally:
            for name in names:
                self._streams.pop(name, None)
                if name == asked.id or not isinstance(asked, BeamSearch):
                    self._served.abort(name)

    def abort(self, request_id: str) -> None:
        self._served.abort(request_id)
        self._streams.pop(request_id).put_nowait(Output(request_id, finish=Finish.ABORT))

    async def _drive(self) -> None:
        for _ in range(5):  # whoever asks at the same time starts in the same step
            await asyncio.sleep(0)
        try:
            while self.engine.busy:
                for output in self._served.step():
                    if output.request_id in self._streams:
                        self._streams[output.request_id].put_nowait(output)
                self.on_step()
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001  whoever waits must hear of it
            for stream in self._streams.values():
                stream.put_nowait(error)
