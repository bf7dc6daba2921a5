"""One forward pass: a step on the host in, logits out. It knows no request and samples nothing."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from turnout.core import AttentionBackend, Batch, KVSpec
from turnout.core.model import Attend, Model
from turnout.plugins.runner.layout import HostBatch


class Forward(Protocol):
    """A way to compute a step; each `runner.mode` is one."""

    def __call__(self, host_batch: HostBatch) -> Tensor:
        """Logits of `host_batch.logit_rows`, [S, vocab]; good until the next call."""
        ...


class Layers:
    """The attention of all layers: their caches, and one plan a step for those that are equal."""

    def __init__(
        self, attention: AttentionBackend[Any, Any], spec: KVSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.attention, self.spec, self.device = attention, spec, device
        self.caches = attention.allocate(spec, dtype, device)
        self._groups = {layer: index for index, layer in enumerate(dict.fromkeys(spec.layers))}
        self._group_of = [self._groups[layer] for layer in spec.layers]

    def plan(self, batch: Batch) -> list[Any]:
        """One plan for each group of equal layers."""
        return [self.attention.plan(batch, layer, self.spec.block_size) for layer in self._groups]

    def refresh(self, plans: list[Any], batch: Batch) -> None:
        """Bring the plans up to date in place; for a backend with `RefreshingPlans`."""
        backend: Any = self.attention
        for plan, layer in zip(plans, self._groups, strict=True):
            backend.refresh(plan, batch, layer, self.spec.block_size)

    def attend(self, plans: list[Any]) -> Attend:
        """Attention as the model sees it."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            return self.attention.run(q, k, v, self.caches[layer], plans[self._group_of[layer]], sinks)

        return attend

    def tensors(self) -> list[Tensor]:
        """Every tensor of every cache; the first dimension of each is the block."""
        return [t for cache in self.caches for t in (cache if isinstance(cache, tuple) else (cache,))]


class Eager:
    """The model's own code, call by call."""

    def __init__(self, model: Model, layers: Layers) -> None:
        self._model, self._layers = model, layers

    def __call__(self, host_batch: HostBatch) -> Tensor:
        batch = host_batch.batch(self._layers.device)
        return self._model(
            batch.tokens, batch.positions, batch.logit_rows, self._layers.attend(self._layers.plan(batch))
        )
