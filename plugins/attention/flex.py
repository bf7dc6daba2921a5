"""Attention through PyTorch's FlexAttention (arXiv 2412.05496): runs wherever torch.compile does. It owns no kernel.

Blocks are gathered into contiguous keys (`flex_parts`): decodes into a batch, prefill chunks into one sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.kernels import cpu as native
from turnout.plugins.attention.flex_parts import Part, decodes_part, fixed, prefills_part

Cache = tuple[Tensor, Tensor]  # keys, values: each [num_blocks, block_size, kv_heads, head_dim]
RECOMPILES = 256  # kernels at most: one for each kind of layer, kind of step and size bucket


class Plan(NamedTuple):
    layer: LayerSpec
    slots: Tensor
    cap: Tensor | None  # the softcap: as a float it would be a symbol, which torch's CPU code does not compile
    parts: list[Part]


@dataclass
class FlexAttention:
    """Gathers blocks and calls FlexAttention, compiled for this machine: the first step of each kind takes seconds."""

    compile: bool = True  # false: FlexAttention's own unfused form, which any device runs, slowly

    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu", "cuda", "xpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        window=True,
        softcap=True,
        sinks=True,
        v_head_dim=True,
        auto_rank={"cuda": 20},
    )

    @staticmethod
    def obstacle() -> str | None:
        """Why it can't be had on this machine."""
        if not torch.cuda.is_available() and native.compiler() is None:
            return f"torch.compile has no C++ compiler; {native.REMEDY}"
        return None

    def kernels(self) -> str:
        return f"FlexAttention of torch {torch.__version__}, " + ("compiled" if self.compile else "unfused")

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        """Zeros."""

        def one(layer: LayerSpec, size: int) -> Tensor:
            shape = (spec.num_blocks, spec.block_size, layer.num_kv_heads, size)
            return torch.zeros(shape, dtype=dtype, device=device)

        self._attend = _flex(self.compile)
        return [(one(layer, layer.head_dim), one(layer, layer.v_head_dim or layer.head_dim)) for layer in spec.layers]

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        starts = np.cumsum((0, *batch.query_lens_host))
        decodes = [b for b, n in enumerate(batch.query_lens_host) if n == 1]
        prefills = [b for b, n in enumerate(batch.query_lens_host) if n > 1]
        parts = []
        if decodes:
            parts.append(decodes_part(decodes, starts, batch, layer, block_size))
        if prefills:
            parts.append(prefills_part(prefills, starts, batch, layer, block_size))
        cap = None if layer.softcap is None else torch.tensor(layer.softcap, device=batch.slots.device)
        return Plan(layer, batch.slots, cap, parts)

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, plan: Plan, sinks: Tensor | None) -> Tensor:
        keys, values = (side.flatten(0, 1) for side in cache)
        keys.index_copy_(0, plan.slots, k)
        values.index_copy_(0, plan.slots, v)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        if sinks is not None:
            sinks = fixed(sinks.float())
        for part in plan.parts:
            out[part.rows[: part.num_rows]] = self._run(q, keys, values, part, plan, sinks)
        return out

    def _run(self, q: Tensor, keys: Tensor, values: Tensor, part: Part, plan: Plan, sinks: Tensor | None) -> Tensor:
        num, length, num_keys = part.shape
        q = q.index_select(0, part.rows).view(num, length, *q.shape[1:]).transpose(1, 2)
        k, v = (side.index_select(0, part.slots) for side in (keys, values))
        if part.spots is not None:
            v.index_fill_(0, part.spots, 0.0)
        k, v = (side.view(num, num_keys, *side.shape[1:]).transpose(1, 2) for side in (k, v))
        score = _score_mod(part.seen[2], plan.cap, sinks)
        out = self._attend(q, k, v, score_mod=score, block_mask=part.mask, scale=plan.layer.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[: part.num_rows]


def _flex(compiled: bool) -> Callable[..., Tensor]:
    """FlexAttention under torch.compile, sizes left open. An error, never a silent fall back to unfused code."""
    from torch.nn.attention.flex_attention import flex_attention

    backend = "inductor" if compiled else "eager"
    function = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)

    @functools.wraps(flex_attention)
    def call(*args: Any, **options: Any) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES), torch.inference_mode():
            out: Tensor = function(*args, **options)
        return out

    return call


def _score_mod(spot: Tensor, cap: Tensor | None, sinks: Tensor | None) -> Callable[..., Tensor] | None:
    """What becomes of a scaled logit: the softcap, or a head's sink in the sink's place."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert cap is not None
        return cap * torch.tanh(score / cap)

    def sunk(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert sinks is not None
        return torch.where(k == spot[b + q], sinks[h], score)

    def both(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sunk(capped(score, b, h, q, k), b, h, q, k)

    if cap is None:
        return None if sinks is None else sunk
    return capped if sinks is None else both
