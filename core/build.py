"""From a composed configuration to an engine. Everything that can be wrong is found before the weights load."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from turnout.core import plugins
from turnout.core.config import Config, Limits, chosen, to_container
from turnout.core.engine import Engine
from turnout.core.interfaces import (
    BlockManager,
    Model,
    ModelInfo,
    ModelLoader,
    ModelRunner,
    PreparedQuantizer,
    SharingBlocks,
)
from turnout.core.negotiate import choose_attention, choose_quantizer
from turnout.core.plugins import Plugins
from turnout.core.types import EngineInfo, KVSpec, ModelError

SAMPLE = 1 << 16  # bytes

Progress = Callable[[str, float], None]  # (what is being done, share done)


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
    path = loader.find(config.model, lambda stage: progress(stage, 0.0))
    located(path)
    info = loader.inspect(path, config.dtype, config.device)
    chose = choose_attention(config, info, found), choose_quantizer(config, info, found)
    max_model_len = _context(config.limits, info)
    if isinstance(config.quant, PreparedQuantizer):
        config.quant.prepare(info.quantization, info)
    served = loader.load(info, config.quant, lambda done, total: progress("loading weights", done / max(total, 1)))
    progress("reserving the key/value cache", 1.0)
    blocks: BlockManager = config.blocks
    num_blocks, note = _cache_size(config, info, max_model_len, served)
    spec = KVSpec(info.layers, blocks.block_size, num_blocks, config.kv_cache_dtype)
    host = config.preemption.num_host_blocks + (blocks.num_host_blocks if isinstance(blocks, SharingBlocks) else 0)
    runner: ModelRunner = config.runner
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
        notes=tuple(n for n in (*info.notes, *chose, note) if n),
    )
    gc.collect()
    gc.freeze()  # what is there now stays: the collector need not walk the model's objects in the middle of a step
    return Engine(runner, config.scheduler, blocks, config.preemption, engine_info, hooks=found.manager)


def fingerprint(config: Config, path: str, found: Plugins) -> str:
    """A short name of what can change an answer: the model's files, composition, versions, and the device.

    The same stack restarted has the same one.
    """
    files = sorted((f.name, _sampled(f)) for f in Path(path).iterdir() if f.is_file())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    parts = [to_container(config, found), files, _described(config, found), plugins.versions(), device]
    return "fp_" + hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _described(config: Config, found: Plugins) -> dict[str, dict[str, str]]:
    """The chosen plugins, each with what its optional `kernels() -> str` says of the native code it computes with."""
    described = found.describe(chosen(config, found))
    for slot, about in described.items():
        kernels = getattr(getattr(config, slot), "kernels", None)
        if kernels is not None and (name := kernels()):
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


def _cache_size(config: Config, info: ModelInfo, max_model_len: int, served: Model) -> tuple[int, str]:
    """How many blocks, and the note that says why."""
    blocks: BlockManager = config.blocks
    if blocks.num_blocks is not None:
        return blocks.num_blocks, ""
    limits, size = config.limits, blocks.block_size
    per_block = _block_bytes(config, info)
    if info.device.type == "cuda":
        peak = _profile(limits, info, served)
        free, total = torch.cuda.mem_get_info(info.device)  # free: what other processes hold is not in it
        room = int(free - total * (1 - limits.gpu_memory_utilization)) - peak
        share = f"limits.gpu_memory_utilization={limits.gpu_memory_utilization} of {total / 2**30:.1f} GiB"
    else:
        free = free_memory()
        room = int(free * limits.cpu_memory_utilization)
        share = f"limits.cpu_memory_utilization={limits.cpu_memory_utilization} of {free / 2**30:.1f} GiB free"
    wanted = limits.max_num_seqs * -(-max_model_len // size)
    num_blocks = min(room // per_block, wanted)
    if num_blocks < 1:
        raise ModelError(
            f"no memory is left for the key/value cache: one block takes {per_block / 2**20:.1f} MiB, {share} leaves "
            f"{max(room, 0) / 2**20:.1f} MiB; raise that share, or set blocks.num_blocks"
        )
    return num_blocks, f"key/value cache: {num_blocks * per_block / 2**30:.2f} GiB, by {share}"


def _block_bytes(config: Config, info: ModelInfo) -> int:
    """Bytes one block takes, in every layer, as the backend keeps it."""
    spec = KVSpec(info.layers, config.blocks.block_size, 1, config.kv_cache_dtype)
    caches = config.attention.allocate(spec, info.dtype, info.device)
    return sum(t.nbytes for cache in caches for t in (cache if isinstance(cache, tuple) else (cache,)))


@torch.inference_mode()
def _profile(limits: Limits, info: ModelInfo, served: Model) -> int:
    """Bytes of GPU memory the largest step takes beside weights and cache: one is run, attention left out."""
    num = limits.max_num_batched_tokens
    tokens = torch.zeros(num, dtype=torch.int64, device=info.device)
    rows = torch.arange(min(limits.max_num_seqs, num), device=info.device)

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])

    torch.cuda.reset_peak_memory_stats(info.device)
    before = torch.cuda.memory_allocated(info.device)
    served(tokens, torch.arange(num, device=info.device) % info.max_len, rows, attend)
    peak = torch.cuda.max_memory_allocated(info.device) - before
    torch.cuda.empty_cache()
    return peak


def free_memory(root: Path = Path("/sys/fs/cgroup"), listing: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes this process may still take: the machine's, or less where a group it is in has a limit (cgroup v2)."""
    free: int = psutil.virtual_memory().available
    try:
        own = next(line[3:] for line in listing.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        own = "/"
    group = root / own.strip("/")
    for place in (group, *group.parents):
        try:
            limit = (place / "memory.max").read_text().strip()
            if limit != "max":
                free = min(free, int(limit) - int((place / "memory.current").read_text()) + _given_back(place))
        except (OSError, ValueError):
            pass  # no such file: no limit
        if place == root:
            break
    return max(free, 0)


def _given_back(group: Path) -> int:
    """Bytes of files that the kernel keeps in memory, which count as used and go when others need the room."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
