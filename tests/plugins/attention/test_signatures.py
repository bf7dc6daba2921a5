"""The emulated libraries take exactly what the packages take, as recorded, and as installed where they are."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from emulated import flash
from emulated.infer import flashinfer
from emulated.record import signatures

from turnout.core import LayerSpec
from turnout.plugins.attention import flash_versions
from turnout.plugins.attention.flash_attn import FlashAttention
from turnout.plugins.attention.flashinfer import FlashInfer
from turnout.testing.attention import check_attention
from turnout.testing.attention_graphs import replayed
from turnout.testing.attention_scene import AttentionCase

RECORDED: dict[str, dict[str, dict[str, str]]] = json.loads(
    (Path(emulated.__file__).parent / "signatures.json").read_text()
)
MADE = {
    "flash_attn.flash_attn_interface": flash.flash_attn_2,
    "flash_attn_interface": flash.flash_attn_3,
    "flash_attn.cute": flash.flash_attn_4,
    "flashinfer": flashinfer,
}
EACH = [(module, function) for module, functions in RECORDED.items() for function in functions]


def taken(function: Callable[..., Any]) -> list[tuple[str, object, object]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def found(module: object, path: str) -> Callable[..., Any]:
    for name in path.split("."):
        module = getattr(module, name)
    assert callable(module)
    return module


def test_every_module_the_adapters_call_is_recorded() -> None:
    assert set(RECORDED) == set(MADE)


@pytest.mark.parametrize(("module", "function"), EACH)
def test_an_emulation_takes_what_the_package_takes(module: str, function: str) -> None:
    recorded = eval(f"lambda {RECORDED[module][function]['takes']}: None")
    assert taken(found(MADE[module](), function)) == taken(recorded)


@pytest.mark.parametrize("module", MADE)
def test_the_installed_package_takes_the_adapters_calls(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        live = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module} can't be imported here: {error}")
    for function, args, kwargs in made_calls(module, monkeypatch):
        inspect.signature(found(live, function)).bind(*args, **kwargs)


@pytest.mark.parametrize("module", MADE)
def test_the_recorded_package_takes_the_adapters_calls(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = made_calls(module, monkeypatch)
    assert {function for function, _, _ in calls} == set(RECORDED[module])
    for function, args, kwargs in calls:
        inspect.signature(eval(f"lambda {RECORDED[module][function]['takes']}: None")).bind(*args, **kwargs)


def made_calls(module: str, patch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What the adapter calls, prefills and decodes, with every feature and refreshed too: (function, args, kwargs)."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    library = MADE[module]()

    def recording(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((path, args, kwargs))
            return function(*args, **kwargs)

        return call

    for path in RECORDED[module]:
        *owner, name = path.split(".")
        holder = getattr(library, owner[0]) if owner else library
        patch.setattr(holder, name, recording(path, getattr(holder, name)))
    for version in flash_versions.VERSIONS:
        for each in version.modules:
            patch.delitem(sys.modules, each, raising=False)
    patch.setitem(sys.modules, module, library)
    backend = FlashInfer(workspace_mb=16) if module == "flashinfer" else FlashAttention()
    kept = ("auto", "fp8") if module == "flashinfer" else ("auto",)
    for cache_dtype in kept:
        layer = LayerSpec(4, 2, 64, 0.1, window=3, softcap=2.0, sinks=True)
        case = AttentionCase("", layer, ((1, 9), (1, 3), (5, 9)), 256, torch.float16, cache_dtype=cache_dtype)
        check_attention(backend, case)
        if module == "flashinfer":
            replayed(backend, case)
    return calls


def test_the_recorder_reads_the_last_definition_without_annotations() -> None:
    source = "class A:\n    def f(self): ...\n    def f(self, x: int, *args, y: float | None = None): ...\ndef g(z=(-1, -1)): ..."
    assert signatures(source, ["A.f", "g"]) == {"A.f": "self, x, *args, y=None", "g": "z=(-1, -1)"}
