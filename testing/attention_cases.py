"""The grid of attention cases for a backend's capabilities: every feature, size and dtype it claims, and edges of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from turnout.core.interfaces import Capabilities
from turnout.core.types import LayerSpec
from turnout.testing.attention_scene import AttentionCase, Lens

RAGGED: Lens = ((1, 1), (5, 5), (1, 40), (7, 23), (33, 33), (1, 17))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # the first one claimed gets every case
SIZES = (64, 32, 40, 80, 96, 128, 192, 256)  # of heads; where a backend takes few, its smallest and largest too
BLOCKS = (16, 8, 32, 128, 1, 12)  # sizes of blocks, likewise
FEATURES: dict[str, Any] = {"window": 5, "softcap": 2.0, "sinks": True, "v_head_dim": None}
ALWAYS = ("ragged prefills and decodes in one call", "lengths at block boundaries")  # in every dtype and form
IN_TURN = (  # what depends on the dtype too: each dtype and form of the cache gets one of them
    "logit softcap",
    "attention sinks",
    "values of another head size",
    "a window of 3",
    "one key head for all",
    "a scale of its own",
)


def attention_cases(capabilities: Capabilities, device: str = "cpu") -> Iterator[AttentionCase]:
    """Every edge in one dtype, and a few of them in each other dtype and in each form of the cache. Without what
    `capabilities.refusals` turns down."""
    whole = list(_grid(capabilities, device))
    yield from (case for case in whole if accepted(capabilities, case))
    turns = [name for name in IN_TURN if any(case.name == name for case in whole)]
    for number, (dtype, form) in enumerate(forms(capabilities)):
        kind = name_of(dtype) + ("" if form == "auto" else f", cache in {form}")
        for case in whole:
            again = replace(case, name=f"{case.name}, {kind}", dtype=dtype, cache_dtype=form)
            if case.name in (*ALWAYS, turns[number % len(turns)]) and accepted(capabilities, again):
                yield again


def selected_cases(capabilities: Capabilities, device: str = "cpu") -> Iterator[AttentionCase]:
    """A plain case, one with every feature it claims at once, and both in each form of its cache."""
    plain = next(_grid(capabilities, device))
    features = {name: value for name, value in FEATURES.items() if getattr(capabilities, name)}
    if "v_head_dim" in features:
        features["v_head_dim"] = plain.layer.head_dim // 2
    layered = replace(plain, name="every feature at once", layer=replace(plain.layer, **features))
    for form in ("auto", *sorted(capabilities.cache_dtypes)):
        for case in (plain, layered) if features else (plain,):
            kind = "" if form == "auto" else f", cache in {form}"
            if accepted(capabilities, found := replace(case, name=case.name + kind, cache_dtype=form)):
                yield found


def unclaimed(capabilities: Capabilities, device: str = "cpu") -> Iterator[tuple[str, list[str]]]:
    """Each thing that the capabilities don't claim, and the reasons with which they refuse it."""
    plain = next(_grid(capabilities, device))

    def asked(what: str, **changed: Any) -> tuple[str, list[str]]:
        layer = {name: changed.pop(name) for name in list(changed) if name in LayerSpec.__dataclass_fields__}
        return what, refusals(capabilities, replace(plain, layer=replace(plain.layer, **layer), **changed))

    for name, value in FEATURES.items():
        if not getattr(capabilities, name):
            yield asked(f"{name} in a layer", **{name: value or plain.layer.head_dim // 2})
    for dtype in DTYPES:
        if capabilities.dtypes is not None and dtype not in capabilities.dtypes:
            yield asked(f"a model in {name_of(dtype)}", dtype=dtype)
    for size in (*SIZES, 24, 72, 576):
        if capabilities.head_dims is not None and size not in capabilities.head_dims:
            yield asked(f"heads of {size}", head_dim=size)
    for size in (*BLOCKS, 256):
        if capabilities.block_sizes is not None and size not in capabilities.block_sizes:
            yield asked(f"blocks of {size}", block_size=size)
    for form in ("fp8", "int8", "int4"):
        if form not in capabilities.cache_dtypes:
            yield asked(f"a cache in {form}", cache_dtype=form)
    if not capabilities.graphs:
        where = plain.block_size, plain.dtype, torch.device(device), "auto", True
        yield "decode steps that are replayed", capabilities.refusals([plain.layer], *where)
    for other in ("cpu", "cuda", "mps"):
        if capabilities.devices is not None and other not in capabilities.devices:
            yield asked(f"the device {other}", device=other)


def forms(capabilities: Capabilities) -> Iterator[tuple[torch.dtype, str]]:
    """Every dtype and form of the cache but the first dtype as it is."""
    dtypes = _dtypes(capabilities)
    pairs = [(dtype, form) for dtype in dtypes for form in ("auto", *sorted(capabilities.cache_dtypes))]
    yield from pairs[1:]


def accepted(capabilities: Capabilities, case: AttentionCase) -> bool:
    return not refusals(capabilities, case)


def refusals(capabilities: Capabilities, case: AttentionCase) -> list[str]:
    device = torch.device(case.device)
    return capabilities.refusals([case.layer], case.block_size, case.dtype, device, case.cache_dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(capabilities: Capabilities) -> list[torch.dtype]:
    return [d for d in DTYPES if capabilities.dtypes is None or d in capabilities.dtypes]


def _grid(capabilities: Capabilities, device: str) -> Iterator[AttentionCase]:
    def claimed(usual: tuple[int, ...], able: frozenset[int] | None) -> list[int]:
        if able is None:
            return list(usual)
        few = {size for size in usual if size in able} | {min(able), max(able)}
        return sorted(few, key=lambda size: (size not in usual[:1], size))

    sizes, blocks = claimed(SIZES, capabilities.head_dims), claimed(BLOCKS, capabilities.block_sizes)
    dim, block, dtype = sizes[0], blocks[0], _dtypes(capabilities)[0]
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
