"""Attention through Dao's FlashAttention: version 2, 3 or 4, whichever is installed and runs on the card.

It knows how each version is called and what it takes; the kernels are theirs (arXiv 2205.14135, 2307.08691, 2407.08608).
Decodes and prefills go in one call: queries end to end, keys through the block table, the causal mask anchored at the last
query and the last key. A sink joins after the fact, from the log of each softmax's sum: out * sigmoid(lse - sink).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.plugins.attention import flash_versions
from turnout.plugins.attention.flash_versions import Call, Version

Cache = tuple[Tensor, Tensor]  # keys, values: each [num_blocks, block_size, kv_heads, head_dim]
WHOLE_TILES = 64  # in blocks of at least so many tokens some versions read a tile past a request's last key


class Plan(NamedTuple):
    call: Call
    slots: Tensor
    sums: Tensor  # int32 [B + 1], prefix sums of the keys: call.key_start
    tails: Tensor | None  # int64 [B * block_size], slots behind each request's last key, or that key's own


@dataclass
class FlashAttention:
    """FlashAttention 2, 3 or 4: the newest that is installed and made for the card."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=frozenset(range(8, 257, 8)),
        window=True,
        softcap=True,
        sinks=True,
        v_head_dim=True,
        graphs=True,
        auto_rank={"cuda": 40},
    )

    @staticmethod
    def obstacle() -> str | None:
        """Why it can't be had on this machine. Imports nothing."""
        return None if flash_versions.installed() else f"no FlashAttention is installed: {flash_versions.REMEDY}"

    @staticmethod
    def refusals(
        layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device, cache_dtype: str
    ) -> list[str]:
        """`capabilities` says what the best version can do; this asks the one that would run here."""
        card = flash_versions.card()
        version = flash_versions.best(card)
        if version is not None:
            return version.refusals(layers, block_size, card)
        if not (installed := flash_versions.installed()):
            return []  # `obstacle` says so
        names = " and ".join(v.title for v in installed)
        return [f"{names} {'does' if len(installed) == 1 else 'do'} not run on {flash_versions.card_name()}"]

    @staticmethod
    def kernels() -> str:
        version = flash_versions.best(flash_versions.card())
        return "" if version is None else version.described()

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        """Zeros, in the layout all versions share."""
        version = flash_versions.best(flash_versions.card())
        assert version is not None, "negotiation refuses what is not installed"
        self._version: Version = version
        self._attend = version.load()

        def one(layer: LayerSpec, size: int) -> Tensor:
            shape = (spec.num_blocks, spec.block_size, layer.num_kv_heads, size)
            return torch.zeros(shape, dtype=dtype, device=device)

        return [(one(layer, layer.head_dim), one(layer, layer.v_head_dim or layer.head_dim)) for layer in spec.layers]

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        sums = batch.kv_lens.new_zeros(len(batch.kv_lens) + 1)
        call = Call(
            layer,
            batch.block_table,
            batch.query_start,
            batch.kv_lens,
            sums,
            max(batch.query_lens_host),
            max(batch.kv_lens_host),
        )
        leaks = block_size >= WHOLE_TILES and self._version.leaks
        plan = Plan(call, batch.slots, sums, _tails(batch, block_size) if leaks else None)
        self._fill(plan, batch)
        return plan

    def refresh(self, plan: Plan, batch: Batch, layer: LayerSpec, block_size: int) -> None:
        """The kernels read the batch's own tensors; only what was computed from them is computed anew."""
        self._fill(plan, batch)
        if plan.tails is not None:
            plan.tails.copy_(_tails(batch, block_size))

    @staticmethod
    def _fill(plan: Plan, batch: Batch) -> None:
        torch.cumsum(batch.kv_lens, 0, dtype=torch.int32, out=plan.sums[1:])

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, plan: Plan, sinks: Tensor | None) -> Tensor:
        keys, values = cache
        if plan.tails is not None:
            values.flatten(0, 1).index_fill_(0, plan.tails, 0.0)
        keys.flatten(0, 1).index_copy_(0, plan.slots, k)
        values.flatten(0, 1).index_copy_(0, plan.slots, v)
        out, lse = self._attend(q, keys, values, plan.call, sinks)
        if lse is None or sinks is None:
            return out
        share = torch.sigmoid(
            lse.transpose(0, 1) - sinks.float()
        )  # [T, heads], of each softmax, that is not the sink's
        return (out * share[..., None]).to(q.dtype)


def _tails(batch: Batch, block_size: int) -> Tensor:
    """int64 [B * block_size]: the slots behind each request's last new one in its block, filled up with that one.

    What others left there, NaN perhaps, meets a weight of 0 in versions that read whole tiles. A request's last block is
    its own to write, so it may be cleared before the new keys are stored.
    """
    last = batch.slots[(batch.query_start[1:] - 1).long()][:, None]
    at = torch.arange(block_size, device=last.device)
    return torch.where(at > last % block_size, last - last % block_size + at, last).flatten()
