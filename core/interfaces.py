"""The contracts most plugins are written for: scheduler, preemption, blocks, attention, quant.

A component is a dataclass whose fields are its options and whose methods satisfy one of these protocols. The engine calls
methods by position, so parameters may have other names. `turnout.core.model` holds the contracts of loaders, runners and
formats, `turnout.core.optional` what a component may offer besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from turnout.core.draft import Draft
from turnout.core.types import Batch, KVSpec, LayerSpec, PreemptMode, Request, RequestView

CacheT = TypeVar("CacheT")
PlanT = TypeVar("PlanT")

ENTRY_POINTS = "turnout"  # the entry-point group a plugin package announces itself in


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an attention backend can do, as data. `None` means any."""

    devices: frozenset[str] | None = None  # torch device types: "cpu", "cuda"
    dtypes: frozenset[torch.dtype] | None = None
    head_dims: frozenset[int] | None = None
    block_sizes: frozenset[int] | None = None
    cache_dtypes: frozenset[str] = frozenset()  # "fp8", "int8": 8-bit forms of the cache beside the model's own dtype
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    v_head_dim: bool = False  # values of another head size than keys
    batch_invariant: bool = False  # a request's output does not depend on its neighbours, bit for bit
    graphs: bool = False  # `run` launches the same kernels whatever the plan holds: see `RefreshingPlans`
    needs: tuple[str, ...] = ()  # modules that must be importable
    # device type, or "any" for all others -> place in attention=auto there, highest first; no entry: only by its name
    auto_rank: Mapping[str, float] = field(default_factory=dict, hash=False)

    def refusals(
        self,
        layers: Sequence[LayerSpec],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: str = "auto",
        graphs: bool = False,
    ) -> list[str]:
        """Every reason why this backend cannot serve such a model; empty: it can."""
        reasons = []
        if self.devices is not None and device.type not in self.devices:
            reasons.append(f"device is {device.type}, it runs on {_listed(self.devices)}")
        if self.dtypes is not None and dtype not in self.dtypes:
            reasons.append(f"dtype is {_short(dtype)}, it computes in {_listed(map(_short, self.dtypes))}")
        if self.block_sizes is not None and block_size not in self.block_sizes:
            reasons.append(f"blocks.block_size is {block_size}, it takes {_listed(self.block_sizes)}")
        if cache_dtype != "auto" and cache_dtype not in self.cache_dtypes:
            kept = _listed({"auto", *self.cache_dtypes})
            reasons.append(f"kv_cache_dtype is {cache_dtype}, it keeps {kept}")
        if graphs and not self.graphs:
            reasons.append("runner.mode=graphs replays decode steps, and its plans can't be refreshed")
        for size in sorted({layer.head_dim for layer in layers}):
            if self.head_dims is not None and size not in self.head_dims:
                reasons.append(f"head_dim is {size}, it takes {_listed(self.head_dims)}")
        features = {
            "sliding window": (self.window, any(layer.window is not None for layer in layers)),
            "logit softcap": (self.softcap, any(layer.softcap is not None for layer in layers)),
            "attention sinks": (self.sinks, any(layer.sinks for layer in layers)),
            "a value head size of its own": (self.v_head_dim, any(layer.v_head_dim is not None for layer in layers)),
        }
        reasons += [f"the model has {name}" for name, (able, needed) in features.items() if needed and not able]
        return reasons


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in sorted(values))


@dataclass
class Auto:
    """attention: the backend of the highest `Capabilities.auto_rank` that can serve the model here. quant: what reads the
    checkpoint. tool_parser, reasoning_parser: what the chat template teaches. structured: what has the highest `auto_rank`
    and can read the tokenizer. The start says which, and why not the others."""


class Scheduler(Protocol):
    """Decides which requests run next, and how many tokens each."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        """Fill `draft` for one step. Called once per step; ended after ten seconds.

        Both sequences are oldest first; preempted requests stand at the front of `waiting`. Time is `draft.now`. When it
        raises, or breaks a rule of the draft, the step is undone and it is called again for another.
        """


class Preemption(Protocol):
    """Decides what happens to the keys and values of a request the scheduler preempts."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory to set aside for swapped requests; 0: none."""

    def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        """Which of them makes room. There is at least one; oldest first."""

    def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
        """Called once per victim, before its blocks are given back. SWAP becomes RECOMPUTE, and is counted, when
        `draft.host_blocks_free` are fewer than `request.num_blocks`."""


class BlockManager(Protocol):
    """Hands out the fixed-size blocks of the key/value cache. It alone writes `request.blocks`."""

    block_size: int  # tokens
    num_blocks: int | None  # None in the configuration: as many as memory allows; set before `start`

    def start(self, num_blocks: int) -> None:
        """Forget everything; `num_blocks` blocks are free. Called once, before any other method."""

    @property
    def num_free(self) -> int:
        """Blocks that `grow` could still hand out."""

    def cached(self, request: Request) -> int:
        """Tokens that `attach` would find now. Changes nothing."""

    def attach(self, request: Request) -> None:
        """Give a request without blocks those of its longest cached prefix and set `num_computed`.
        At least one token stays to be computed. Only blocks published under the same `salt` count."""

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make `request.blocks` hold `num_tokens` tokens. All or nothing; False when out of blocks."""

    def publish(self, request: Request) -> None:
        """Let later requests share the blocks whose tokens are all computed."""

    def release(self, request: Request) -> None:
        """Take back every block and set `num_computed` to 0. Harmless when there are none."""


class AttentionBackend(Protocol[CacheT, PlanT]):
    """Owns the cache layout and the attention kernels.

    A cache is a tensor, or a tuple of tensors, whose first dimension is the block: `cache[block]` is all that one
    block holds for one layer. The core swaps and copies blocks through that dimension.
    """

    capabilities: ClassVar[Capabilities]

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[CacheT]:
        """One cache per layer, in the order of `spec.layers`, for `spec.num_blocks` blocks, kept as `spec.cache_dtype`
        says. Asked for one block first, to measure what a block takes."""

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> PlanT:
        """Work shared by all layers with this spec. Once per step and spec; may touch the host."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: CacheT, plan: PlanT, sinks: Tensor | None) -> Tensor:
        """Store k and v at the batch's slots, then attend causally, last query to last key. Once per layer.

        q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim]; sinks: [heads] or None;
        returns [T, heads, v_head_dim] in q's dtype. Rows that see no key are zero. Never syncs with the host.
        Slots past a request's keys may hold NaN that others left: none of it may reach the output.
        """


class Quantizer(Protocol):
    """Turns the checkpoint tensors of one linear layer into a module, one layer at a time."""

    checkpoint_formats: ClassVar[frozenset[str]]  # `quant_method`s of quantization_config it reads; empty: floats only

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """`name` is the layer's path in the model; `tensors` what the checkpoint holds under it. Of floats: "weight"
        [out, in], perhaps "bias" [out], in the served dtype. Of a checkpoint in one of the quantizer's formats: whatever
        is stored, as it is stored; a layer it left unquantized looks like one of floats. On the model's device.
        The module maps [..., in] to [..., out] in x's dtype. Raises ModelError naming the layer."""
