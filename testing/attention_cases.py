"""The grid of attention cases for a backend's capabilities: every feature, size and dtype it claims, and edges of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from turnout.core.interfaces import Capabilities
from turnout.core.types import LayerSpec
from turnout.testing.attention import AttentionCase
from turnout.testing.attention_scene import Lens

RAGGED: Lens = ((1, 1), (5, 5), (1, 40), (7, 23), (33, 33), (1, 17))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # the first one claimed gets the whole grid


def attention_cases(capabilities: Capabilities, device: str = "cpu") -> Iterator[AttentionCase]:
    """The whole grid in one dtype, and what depends on the dtype in each other one and in each form of the cache."""
    dtypes = [d for d in DTYPES if capabilities.dtypes is None or d in capabilities.dtypes]
    whole = list(_grid(capabilities, dtypes[0], device))
    yield from whole
    brief = [case for case in whole if case.name in BRIEF]
    for dtype in dtypes:
        for form in ("auto", *sorted(capabilities.cache_dtypes)):
            if dtype != dtypes[0] or form != "auto":
                kind = str(dtype).removeprefix("torch.") + ("" if form == "auto" else f", cache in {form}")
                yield from (replace(c, name=f"{c.name}, {kind}", dtype=dtype, cache_dtype=form) for c in brief)


BRIEF = {
    "ragged prefills and decodes in one call",
    "lengths at block boundaries",
    "one key head for all",
    "a scale of its own",
    "a window of 3",
    "logit softcap",
    "attention sinks",
    "values of another head size",
}


def _grid(capabilities: Capabilities, dtype: torch.dtype, device: str) -> Iterator[AttentionCase]:
    sizes = [s for s in (64, 80, 128, 32, 96) if capabilities.head_dims is None or s in capabilities.head_dims]
    blocks = [s for s in (16, 8, 32, 64, 4) if capabilities.block_sizes is None or s in capabilities.block_sizes]
    sizes = sizes or sorted(capabilities.head_dims or ())
    blocks = blocks or sorted(capabilities.block_sizes or ())
    dim, block = sizes[0], blocks[0]
    edges: Lens = tuple((1, n) for n in (block - 1, block, block + 1, 2 * block)) + tuple(
        (new, old + new) for old in (0, 1, block - 1, block, block + 1) for new in (2, block)
    )

    def case(
        name: str, lens: Lens = RAGGED, heads: int = 6, kv_heads: int = 2, block_size: int = block, **rest: Any
    ) -> AttentionCase:
        spec = {"head_dim": dim, "scale": dim**-0.5} | rest
        return AttentionCase(name, LayerSpec(heads, kv_heads, **spec), lens, block_size, dtype, device)

    yield case("ragged prefills and decodes in one call")
    yield case("lengths at block boundaries", edges)
    yield from (case(f"{ratio} heads a key head", heads=2 * ratio) for ratio in (1, 5, 7, 8, 16))
    yield case("one key head for all", heads=4, kv_heads=1)
    yield from (case(f"head size {size}", head_dim=size, scale=size**-0.5) for size in sizes[1:])
    yield from (case(f"block size {size}", block_size=size) for size in blocks[1:])
    yield case("a scale of its own", scale=0.3)
    if capabilities.window:
        yield from (case(f"a window of {w}", RAGGED + edges, window=w) for w in sorted({1, 3, block, block + 1}))
    if capabilities.softcap:
        yield case("logit softcap", softcap=2.0)
    if capabilities.sinks:
        yield case("attention sinks", sinks=True)
    if capabilities.window and capabilities.sinks:
        yield case("attention sinks in a window", window=5, sinks=True)
    if capabilities.v_head_dim:
        yield case("values of another head size", v_head_dim=dim // 2)
