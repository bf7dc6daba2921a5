"""From a composed configuration to an engine. Everything that can be wrong is found before the weights load."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from turnout.compose import plugins
from turnout.compose.config import Config, chosen, to_container
from turnout.compose.negotiate import choose_attention, choose_quantizer, choose_structured
from turnout.compose.plugins import Plugins
from turnout.core.engine import Engine
from turnout.core.interfaces import BlockManager
from turnout.core.model import ModelInfo, ModelLoader, ModelRunner, Progress
from turnout.core.optional import AsyncRunner, NamedKernels, NotedModel, PreparedQuantizer, SharingBlocks
from turnout.core.pipelined import PipelinedEngine
from turnout.core.types import EngineInfo, KVSpec, Limits, ModelError

SAMPLE = 1 << 16  # bytes


def build_engine(
    config: Config,
    progress: Progress = lambda stage, share: None,
    located: Callable[[str], None] = lambda path: None,
) -> Engine:
    """Raises ModelError, PluginError or ValueError with a message for the user.

    `located` hears the model's folder as soon as it is there, so that its tokenizer can be loaded meanwhile.
    """
    found = plugins.load()
    found.describe(chosen(config, found))  # a chosen plugin that is broken or claimed twice ends here
    progress("reading the model's configuration", 0.0)
    loader: ModelLoader = config.loader
    formats = found.formats()
    path = loader.find(config.model, formats, lambda stage: progress(stage, 0.0))
    located(path)
    info = loader.inspect(path, config.dtype, config.device)
    max_model_len = _context(config.limits, info)
    runner: ModelRunner = config.runner
    info = runner.prepare(info, replace(config.limits, max_model_len=max_model_len), progress)
    chose = (
        choose_attention(config, info, found),
        choose_quantizer(config, info, found),
        choose_structured(config, info, found),
    )
    if isinstance(config.quant, PreparedQuantizer):
        config.quant.prepare(info.quantization, info)
    with _fitting(config, info):
        served = loader.load(
            info, config.quant, formats, lambda done, total: progress("loading weights", done / max(total, 1))
        )
    said = served.notes if isinstance(served, NotedModel) else ()
    progress("reserving the key/value cache", 1.0)
    blocks: BlockManager = config.blocks
    spec, note = KVSpec(info.layers, blocks.block_size, 1, config.kv_cache_dtype), ""
    num_blocks = blocks.num_blocks
    if num_blocks is None:
        num_blocks, note = runner.room(served, config.attention, spec)
    spec = replace(spec, num_blocks=num_blocks)
    host = config.preemption.num_host_blocks + (blocks.num_host_blocks if isinstance(blocks, SharingBlocks) else 0)
    with _fitting(config, info):
        runner.start(served, config.attention, spec, info.dtype, info.device, host)
    engine_info = EngineInfo(
        model=config.model,
        path=path,
        architecture=info.architecture,
        dtype=str(info.dtype).removeprefix("torch."),
        device=str(info.device),
        vocab_size=info.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=blocks.block_size,
        capacity=num_blocks * blocks.block_size,
        max_num_seqs=config.limits.max_num_seqs,
        max_num_batched_tokens=config.limits.max_num_batched_tokens,
        fingerprint=fingerprint(config, path, found),
        composition=to_container(config, found),
        plugins=_described(config, found),
        versions=plugins.versions(),
        notes=tuple(n for n in (*info.notes, *said, *chose, note) if n),
    )
    gc.collect()
    gc.freeze()  # what is there now stays: the collector need not walk the model's objects in the middle of a step
    make = PipelinedEngine if isinstance(runner, AsyncRunner) else Engine
    return make(
        runner,
        config.scheduler,
        blocks,
        config.preemption,
        engine_info,
        hooks=found.manager,
        structured=config.structured,
        limits=config.limits,
    )


@contextmanager
def _fitting(config: Config, info: ModelInfo) -> Iterator[None]:
    """Whatever a library says when memory runs out, as a ModelError with the figures and what to do."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        known = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if not known and not re.search(r"can't allocate memory|out of memory", str(error)):
            raise
        size = info.num_parameters * info.dtype.itemsize / 2**30
        dtype = str(info.dtype).removeprefix("torch.")
        raise ModelError(
            f"memory ran out while {config.model} was made ready: its {info.num_parameters:,} parameters take {size:.1f} GiB "
            f"in {dtype}, and this process may not have so much beside what it holds. Raise the limit (ulimit -v, the "
            f"container's memory), or choose a 16-bit dtype=, quant=int8, fewer blocks.num_blocks, or a smaller model"
        ) from error


def fingerprint(config: Config, path: str, found: Plugins) -> str:
    """A short name of what can change an answer: the model's files, composition, versions, and the device.

    The same stack restarted has the same one.
    """
    files = sorted((f.name, _sampled(f)) for f in Path(path).iterdir() if f.is_file())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    parts = [to_container(config, found), files, _described(config, found), plugins.versions(), device]
    return "fp_" + hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _described(config: Config, found: Plugins) -> dict[str, dict[str, str]]:
    """The chosen plugins, each with what it says of the native code it computes with."""
    described = found.describe(chosen(config, found))
    for slot, about in described.items():
        component = getattr(config, slot)
        if isinstance(component, NamedKernels) and (name := component.kernels()):
            about["kernels"] = name
    return described


def _sampled(file: Path) -> str:
    """A hash of a file's size, beginning, middle and end: weights trained further differ everywhere."""
    size, found = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for place in (0, size // 2, size - SAMPLE):
            opened.seek(max(place, 0))
            found.update(opened.read(SAMPLE))
    return f"{size} {found.hexdigest()}"


def _context(limits: Limits, info: ModelInfo) -> int:
    if limits.max_model_len is not None and limits.max_model_len > info.max_len:
        raise ModelError(
            f"limits.max_model_len is {limits.max_model_len}, but the model was made for {info.max_len} tokens; "
            f"choose at most that"
        )
    return limits.max_model_len or info.max_len
