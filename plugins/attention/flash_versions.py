"""The versions of FlashAttention: which are installed, what runs on the card, how each is called. It owns no cache.

        module                                  cards                    blocks of          differs in
2       flash_attn (flash-attn)                 since Ampere             multiples of 256   lengths as prefix sums
3       flash_attn_interface (flash_attn_3)     Hopper                   any                lengths as they are
4       flash_attn.cute (flash-attn-4)          Hopper, Blackwell 10.x   any                takes sinks itself
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from turnout.core import LayerSpec

REMEDY = (
    "`pip install flash-attn` (version 2, cards since Ampere), `pip install flash-attn-4` (Hopper, Blackwell), or build "
    "version 3 from the folder hopper of its repository (Hopper)"
)
Card = tuple[int, int] | None  # compute capability; None: there is no GPU


class Call(NamedTuple):
    """One call, the same for every layer of a group."""

    layer: LayerSpec
    block_table: Tensor  # int32 [B, W]
    query_start: Tensor  # int32 [B + 1]
    kv_lens: Tensor  # int32 [B]
    key_start: Tensor  # int32 [B + 1]
    max_queries: int
    max_keys: int

    @property
    def window(self) -> tuple[int, int]:
        """Keys before and after a query that it sees, itself not counted; -1: any number."""
        return (-1, -1) if self.layer.window is None else (self.layer.window - 1, 0)


Attend = Callable[[Tensor, Tensor, Tensor, Call, Tensor | None], tuple[Tensor, Tensor | None]]
# (q, keys, values, call, sinks) -> out [T, heads, v_head_dim], and lse float32 [heads, T] where a sink is still to join


@dataclass(frozen=True)
class Version:
    """One version of the library."""

    number: int
    modules: tuple[str, ...]  # the first that is there is used
    package: str  # distribution, for its version
    cards: tuple[int, ...]  # major compute capabilities
    bind: Callable[[object], Attend]
    leaks: bool  # values past a request's last key are read, and must be finite

    @property
    def title(self) -> str:
        return f"FlashAttention {self.number}"

    def module(self) -> str | None:
        return next((name for name in self.modules if _there(name)), None)

    def load(self) -> Attend:
        """Imports it. Only a chosen backend gets here."""
        name = self.module()
        assert name is not None
        return self.bind(importlib.import_module(name))

    def described(self) -> str:
        try:
            return f"{self.title} ({self.package} {version(self.package)})"
        except PackageNotFoundError:  # built in place
            return f"{self.title} ({self.module()})"

    def refusals(self, layers: Sequence[LayerSpec], block_size: int, card: Card) -> list[str]:
        """Why this version can't serve such a model, beyond what no version can."""
        reasons = []
        if self.number == 2 and block_size % 256:
            reasons.append(f"blocks.block_size is {block_size}, {self.title} takes multiples of 256")
        sizes = {(layer.head_dim, layer.v_head_dim or layer.head_dim) for layer in layers}
        for dim, v_dim in sorted(sizes):
            if not self._takes(dim, v_dim, card):
                other = "" if dim == v_dim else f" with values of {v_dim}"
                reasons.append(f"head_dim is {dim}{other}, which {self.title} does not take on this card")
        return reasons

    def _takes(self, dim: int, v_dim: int, card: Card) -> bool:
        if self.number == 2:
            return dim == v_dim
        if self.number == 3:
            return dim == v_dim or (128 < dim <= 192 and 96 < v_dim <= 128) or (dim <= 64 and v_dim <= 512)
        if dim % 16 or v_dim % 16:
            return False
        if card is not None and card[0] >= 10:
            return max(dim, v_dim) <= 128 or (dim, v_dim) == (192, 128)
        return max(dim, v_dim) <= 256


def card() -> Card:
    """The GPU's compute capability."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def card_name() -> str:
    found = card()
    return (
        "this machine"
        if found is None
        else f"{torch.cuda.get_device_name()} (compute capability {found[0]}.{found[1]})"
    )


def installed() -> list[Version]:
    return [each for each in VERSIONS if each.module() is not None]


def best(found: Card) -> Version | None:
    """The first of `VERSIONS` that is installed and made for the card; without a card, that is installed."""
    return next((each for each in installed() if found is None or found[0] in each.cards), None)


def _there(module: str) -> bool:
    """Whether a module could be imported, found without importing it or its package."""
    if module in sys.modules:
        return True
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    places = [Path(place, *rest) for place in spec.submodule_search_locations or ()]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)


def _bind_2(module: object) -> Attend:
    varlen = module.flash_attn_varlen_func  # type: ignore[attr-defined]

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, call: Call, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        found = varlen(
            q,
            keys,
            values,
            cu_seqlens_q=call.query_start,
            cu_seqlens_k=call.key_start,
            max_seqlen_q=call.max_queries,
            max_seqlen_k=call.max_keys,
            softmax_scale=call.layer.scale,
            causal=True,
            window_size=call.window,
            softcap=call.layer.softcap or 0.0,
            return_attn_probs=sinks is not None,
            block_table=call.block_table,
        )
        return (found, None) if sinks is None else (found[0], found[1])

    return attend


def _bind_3(module: object) -> Attend:
    with_kvcache = module.flash_attn_with_kvcache  # type: ignore[attr-defined]

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, call: Call, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        found = with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=call.kv_lens,
            page_table=call.block_table,
            cu_seqlens_q=call.query_start,
            max_seqlen_q=call.max_queries,
            softmax_scale=call.layer.scale,
            causal=True,
            window_size=call.window,
            softcap=call.layer.softcap or 0.0,
            return_softmax_lse=sinks is not None,
        )
        return (found, None) if sinks is None else (found[0], found[1])

    return attend


def _bind_4(module: object) -> Attend:
    varlen = module.flash_attn_varlen_func  # type: ignore[attr-defined]

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, call: Call, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        found = varlen(
            q,
            keys,
            values,
            cu_seqlens_q=call.query_start,
            seqused_k=call.kv_lens,
            max_seqlen_q=call.max_queries,
            page_table=call.block_table,
            softmax_scale=call.layer.scale,
            causal=True,
            window_size=(None, None) if call.layer.window is None else call.window,
            learnable_sink=sinks,
            softcap=call.layer.softcap or 0.0,
        )
        return (found[0] if isinstance(found, tuple) else found), None

    return attend


VERSIONS = (  # best first
    Version(
        3, ("flash_attn_interface", "flash_attn_3.flash_attn_interface"), "flash_attn_3", (9,), _bind_3, leaks=True
    ),
    Version(4, ("flash_attn.cute",), "flash-attn-4", (9, 10, 11), _bind_4, leaks=True),
    Version(2, ("flash_attn.flash_attn_interface",), "flash-attn", (8, 9, 10, 12), _bind_2, leaks=False),
)
