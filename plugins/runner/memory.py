"""What memory is left for the key/value cache once a model is loaded. It knows no request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnout.core import AttentionBackend, KVSpec, ModelError, ModelInfo
from turnout.core.model import Limits, Model
from turnout.kernels import cpu as native
from turnout.plugins.runner.allowance import free_memory


def fitting(
    info: ModelInfo, limits: Limits, attention: AttentionBackend[Any, Any], spec: KVSpec, free: int, rule: str
) -> tuple[int, str]:
    """How many blocks as `spec`'s one fit into `free` bytes, at most what all seats at full length need. Raises
    ModelError with the `rule` that left none."""
    assert limits.max_model_len is not None
    caches = attention.allocate(spec, info.dtype, info.device)
    per_block = sum(t.nbytes for cache in caches for t in (cache if isinstance(cache, tuple) else (cache,)))
    num_blocks = min(free // per_block, limits.max_num_seqs * -(-limits.max_model_len // spec.block_size))
    if num_blocks < 1:
        raise ModelError(
            f"no memory is left for the key/value cache: one block takes {per_block / 2**20:.1f} MiB, {rule} leaves "
            f"{max(free, 0) / 2**20:.1f} MiB; raise that share, or set blocks.num_blocks"
        )
    return num_blocks, f"key/value cache: {num_blocks * per_block / 2**30:.2f} GiB, by {rule}"


def room(info: ModelInfo, limits: Limits, model: Model, replays: bool) -> tuple[int, str]:
    """Bytes the cache may take, and the rule in words. On a GPU the largest step is left out, and a decode step once
    more where it `replays`: a recorded step keeps its memory."""
    if info.device.type == "cuda":
        peak = largest(info, model, limits.max_num_batched_tokens, limits.max_num_seqs)
        if replays:
            num = min(limits.max_num_seqs, limits.max_num_batched_tokens)
            peak += largest(info, model, num, num)
        free, total = torch.cuda.mem_get_info(info.device)  # free: what other processes hold is not in it
        share = f"limits.gpu_memory_utilization={limits.gpu_memory_utilization} of {total / 2**30:.1f} GiB"
        return int(free - total * (1 - limits.gpu_memory_utilization)) - peak, share
    free = free_memory() - native.SCRATCH
    share = f"limits.cpu_memory_utilization={limits.cpu_memory_utilization} of {free / 2**30:.1f} GiB free"
    return int(free * limits.cpu_memory_utilization), share


@torch.inference_mode()
def largest(info: ModelInfo, model: Model, num_tokens: int, num_seqs: int) -> int:
    """Bytes of GPU memory a step of so many tokens takes beside weights and cache: one is run, attention left out."""
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=info.device)
    rows = torch.arange(min(num_seqs, num_tokens), device=info.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])

    torch.cuda.reset_peak_memory_stats(info.device)
    before = torch.cuda.memory_allocated(info.device)
    model(tokens, torch.arange(num_tokens, device=info.device) % info.max_len, rows, attend)
    peak = torch.cuda.max_memory_allocated(info.device) - before
    torch.cuda.empty_cache()
    return peak
