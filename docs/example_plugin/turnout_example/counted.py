"""Wraps the reference backend and counts what passes through: the shape of any wrapper, or of a kernel under test."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.plugins.attention.torch_sdpa import Cache, Plan, TorchAttention


@dataclass
class Counted:
    """The reference backend, which also says every `every` steps how many queries it has answered; 0: never."""

    every: int = 0

    capabilities: ClassVar[Capabilities] = TorchAttention.capabilities

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"attention.every must not be negative, got {self.every}")
        self._inner, self._steps, self._queries = TorchAttention(), 0, 0

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        return self._inner.allocate(spec, dtype, device)

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        self._steps += 1
        self._queries += sum(batch.query_lens_host)
        if self.every and self._steps % self.every == 0:
            print(f"counted: {self._queries} queries in {self._steps} steps", flush=True)
        return self._inner.plan(batch, layer, block_size)

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, plan: Plan, sinks: Tensor | None) -> Tensor:
        return self._inner.run(q, k, v, cache, plan, sinks)
