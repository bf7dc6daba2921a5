"""CUDA graphs without a GPU: a tape of tensor operations, and an attention backend whose plans can be refreshed.

The tape holds each operation with the very tensors and numbers it was called with. Playing it runs no Python of ours:
what was a number then is that number now, and a tensor made since is never looked at. So whatever would go wrong with a
recorded graph, a plan that was not refreshed or a buffer that moved, goes wrong here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turnout.core import Batch, Capabilities, LayerSpec
from turnout.plugins.attention.torch_sdpa import TorchAttention

SYNCS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")  # ask the device for a value: no graph can


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in SYNCS:
            raise RuntimeError(f"{func} waits for the device: operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def _storages(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


class Tape:
    """A recorder for the CPU."""

    device: ClassVar[str] = "cpu"

    def __init__(self, device: torch.device) -> None: ...

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        with _Recording() as recording:
            compute()

        @torch.inference_mode()
        def play() -> None:
            for func, args, kwargs, out in recording.calls:
                writes = func._schema.is_mutable
                if not writes and _storages(out) & _storages((args, kwargs)):
                    continue  # a view of what is there
                new = func(*args, **kwargs)
                if not writes:
                    for old, now in zip(tree_leaves(out), tree_leaves(new), strict=True):
                        if isinstance(old, Tensor):
                            old.copy_(now)

        return play


class Steady(NamedTuple):
    """A plan for decodes that reads every column of the block table, whatever the lengths."""

    layer: LayerSpec
    slots: Tensor  # int64 [B]
    table: Tensor  # int64 [B, W]
    unseen: Tensor  # bool [B, W * block_size]: beyond the request's keys, or before its window


@dataclass
class Refreshing(TorchAttention):
    """The reference for prefills; decodes by a fixed sequence of operations."""

    capabilities: ClassVar[Capabilities] = replace(TorchAttention.capabilities, cache_dtypes=frozenset(), graphs=True)

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Any:
        if max(batch.query_lens_host) > 1:
            return super().plan(batch, layer, block_size)
        at = torch.arange(batch.block_table.shape[1] * block_size)
        unseen = at >= batch.kv_lens[:, None]
        if layer.window is not None:
            unseen |= at < (batch.kv_lens - layer.window)[:, None]
        return Steady(layer, batch.slots, batch.block_table.long(), unseen)

    def refresh(self, plan: Any, batch: Batch, layer: LayerSpec, block_size: int) -> None:
        fresh = self.plan(batch, layer, block_size)
        plan.table.copy_(fresh.table)
        plan.unseen.copy_(fresh.unseen)

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, plan: Any, sinks: Tensor | None) -> Tensor:
        if not isinstance(plan, Steady):
            return super().run(q, k, v, cache, plan, sinks)
        layer = plan.layer
        for side, new in zip(cache, (k, v), strict=True):
            side.flatten(0, 1).index_copy_(0, plan.slots, new)
        hidden = plan.unseen[:, :, None, None]
        keys, values = (side[plan.table].flatten(1, 2).masked_fill(hidden, 0.0) for side in cache)
        grouped = q.unflatten(1, (layer.num_kv_heads, -1))  # [B, kv_heads, group, dim]
        logits = torch.einsum("bhgd,bkhd->bhgk", grouped, keys) * layer.scale
        if layer.softcap is not None:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        weights = logits.masked_fill(plan.unseen[:, None, None], float("-inf")).softmax(-1)
        return torch.einsum("bhgk,bkhd->bhgd", weights, values).flatten(1, 2)


@dataclass
class Forgetful(Refreshing):
    """Never refreshes."""

    def refresh(self, plan: Any, batch: Batch, layer: LayerSpec, block_size: int) -> None: ...
