"""Planted faults that `turnout ab` has to find: each is a small mistake that an engine could really have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from engines import BACKENDS
from torch import Tensor, nn

from turnout.core import Batch, LayerSpec, Sampling
from turnout.lab.compare.sides import EngineSide, Item, Written
from turnout.plugins.attention.torch_sdpa import Plan, TorchAttention

GROUP, LEVELS = 16, 15  # inputs that share a step; four bits


class Scaled(TorchAttention):
    """The scale is off by one per cent."""

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        return super().plan(batch, replace(layer, scale=layer.scale * 1.01), block_size)


class WiderWindow(TorchAttention):
    """The window is off by one."""

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        return super().plan(batch, replace(layer, window=(layer.window or 0) + 1), block_size)


class Swapped(TorchAttention):
    """The last two full blocks of long contexts are exchanged."""

    beyond: ClassVar[int] = 64  # tokens

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        table = batch.block_table.clone()
        for row, length in enumerate(batch.kv_lens_host):
            last = (length - 1) // block_size
            if length > self.beyond:
                table[row, [last - 1, last]] = table[row, [last, last - 1]]
        return super().plan(replace(batch, block_table=table), layer, block_size)


class SwappedFar(Swapped):
    beyond = 1024


class Dropped(TorchAttention):
    """A decode does not see the last block unless it is full."""

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        seen = tuple(
            length // block_size * block_size if queries == 1 and length > block_size else length
            for queries, length in zip(batch.query_lens_host, batch.kv_lens_host, strict=True)
        )
        lens = torch.tensor(seen, dtype=torch.int32)
        return super().plan(replace(batch, kv_lens=lens, kv_lens_host=seen), layer, block_size)


BACKENDS.update(
    {"scaled": Scaled, "wider window": WiderWindow, "swapped": Swapped, "swapped far": SwappedFar, "dropped": Dropped}
)


@dataclass
class FourBits:
    """Weights rounded to four bits with a step and a zero point for every group of inputs, as GPTQ stores them."""

    wrong: str = ""  # the layer whose zero points are off by one

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset()

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        weight = tensors["weight"]
        made = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in tensors, device="meta")
        made.weight = nn.Parameter(self._rounded(name, weight), requires_grad=False)
        if "bias" in tensors:
            made.bias = nn.Parameter(tensors["bias"], requires_grad=False)
        return made

    def _rounded(self, name: str, weight: Tensor) -> Tensor:
        groups = weight.float().unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (high - low) / LEVELS
        zero = (-low / step).round()
        codes = ((groups / step).round() + zero).clamp(0, LEVELS)
        zero += self.wrong == name
        return ((codes - zero) * step).flatten(1).to(weight.dtype)


class Hot(EngineSide):
    """Every temperature is replaced by another, and nothing says so."""

    def write(self, items: Sequence[Item], samplings: Mapping[str, Sampling], num_top: int) -> dict[str, Written]:
        return super().write(items, {rid: replace(s, temperature=1.2) for rid, s in samplings.items()}, num_top)
