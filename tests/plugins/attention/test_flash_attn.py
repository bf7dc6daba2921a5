"""attention=flash_attn, on emulations of versions 2, 3 and 4: each must keep the contract, and faults must be caught."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import flash

from turnout.core import Capabilities, LayerSpec
from turnout.plugins.attention import flash_versions
from turnout.plugins.attention.flash_attn import FlashAttention
from turnout.testing import AttentionContract
from turnout.testing.attention import check_attention
from turnout.testing.attention_scene import AttentionCase

MODULES = {
    2: ("flash_attn.flash_attn_interface", flash.flash_attn_2),
    3: ("flash_attn_interface", flash.flash_attn_3),
    4: ("flash_attn.cute", flash.flash_attn_4),
}
CARDS = {2: (8, 0), 3: (9, 0), 4: (9, 0)}


def install(patch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Just these versions are installed."""
    names = {name for version in flash_versions.VERSIONS for name in version.modules}
    for name in names:
        patch.delitem(sys.modules, name, raising=False)
    patch.setattr("importlib.util.find_spec", _unless(names))
    for number in numbers:
        name, made = MODULES[number]
        patch.setitem(sys.modules, name, made())


def _unless(hidden: set[str]) -> Callable[..., Any]:
    from importlib.util import find_spec

    tops = {name.split(".")[0] for name in hidden}
    return lambda name, package=None: None if name in tops else find_spec(name, package)


def claims(number: int) -> Capabilities:
    """What one version claims, as if its card were this machine."""
    version = next(v for v in flash_versions.VERSIONS if v.number == number)

    class Claims(Capabilities):
        def refusals(
            self, layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype, *rest: Any, **more: Any
        ) -> list[str]:
            reasons = super().refusals(layers, block_size, dtype, *rest, **more)
            return reasons + version.refusals(layers, block_size, CARDS[number])

    known = FlashAttention.capabilities
    fields = {name: getattr(known, name) for name in known.__dataclass_fields__}
    sizes = frozenset({256, 512}) if number == 2 else None
    return Claims(**fields | {"devices": None, "block_sizes": sizes, "v_head_dim": number != 2})


class Emulated(AttentionContract):
    make = FlashAttention
    device = "cpu"
    number: int

    @property
    def capabilities(self) -> Capabilities:
        return claims(self.number)

    def setup_method(self) -> None:
        self.patch = pytest.MonkeyPatch()
        install(self.patch, self.number)
        super().setup_method()

    def teardown_method(self) -> None:
        self.patch.undo()


@pytest.mark.slow
class TestVersion2(Emulated):
    number = 2


class Selected(Emulated):
    """Versions differ in the names of what they are given, not in the sizes of heads and blocks."""

    def cases(self) -> list[AttentionCase]:
        return self.selected()


@pytest.mark.slow
class TestVersion3(Selected):
    number = 3


@pytest.mark.slow
class TestVersion4(Selected):
    number = 4


SMALL = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "scale": 0.1}
LENS = ((1, 9), (5, 5), (7, 23), (1, 40), (3, 40))
LAYERS = (
    LayerSpec(**SMALL),
    LayerSpec(**SMALL, window=3),
    LayerSpec(**SMALL, softcap=2.0),
    LayerSpec(**SMALL, sinks=True),
)
Change = Callable[[dict[str, Any]], dict[str, Any]]


def cases(number: int, block_size: int | None = None) -> list[AttentionCase]:
    size = block_size or (256 if number == 2 else 16)
    return [AttentionCase(f"{layer}", layer, LENS, size, torch.float16) for layer in LAYERS]


def replaced(name: str, value: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda given: given | {name: value(given)} if name in given else given


FAULTS: dict[str, list[Change]] = {  # a change applies where the version has an argument of that name
    "the lengths of keys are those of queries": [
        replaced("cu_seqlens_k", lambda given: given["cu_seqlens_q"]),
        replaced("cache_seqlens", lambda given: given["cu_seqlens_q"].diff()),
        replaced("seqused_k", lambda given: given["cu_seqlens_q"].diff()),
    ],
    "the lengths of keys do not count the step's own": [
        replaced("cu_seqlens_k", lambda given: given["cu_seqlens_k"] - given["cu_seqlens_q"]),
        replaced("cache_seqlens", lambda given: given["cache_seqlens"] - given["cu_seqlens_q"].diff()),
        replaced("seqused_k", lambda given: given["seqused_k"] - given["cu_seqlens_q"].diff()),
    ],
    "lengths stand where their sums belong": [
        replaced("cu_seqlens_k", lambda given: torch.nn.functional.pad(given["cu_seqlens_k"].diff(), (1, 0))),
        replaced("cu_seqlens_q", lambda given: torch.nn.functional.pad(given["cu_seqlens_q"].diff(), (1, 0))),
    ],
    "a window of one key more": [
        replaced("window_size", lambda given: given["window_size"] and _wider(given["window_size"])),
    ],
    "the window is dropped": [replaced("window_size", lambda given: (-1, -1))],
    "the scale is dropped": [replaced("softmax_scale", lambda given: None)],
    "the softcap is dropped": [replaced("softcap", lambda given: 0.0)],
    "the mask is not causal": [replaced("causal", lambda given: False)],
    "block tables of other requests": [
        replaced("block_table", lambda given: given["block_table"].flip(0)),
        replaced("page_table", lambda given: given["page_table"].flip(0)),
    ],
    "the block table is transposed": [
        replaced("block_table", lambda given: given["block_table"].T.contiguous()),
        replaced("page_table", lambda given: given["page_table"].T.contiguous()),
    ],
    "block ids in 64 bits": [
        replaced("block_table", lambda given: given["block_table"].long()),
        replaced("page_table", lambda given: given["page_table"].long()),
    ],
    "the longest query is taken for a short one": [replaced("max_seqlen_q", lambda given: 1)],
    "sinks are dropped": [
        replaced("learnable_sink", lambda given: None),
        lambda given: given | {"drops": True} if "learnable_sink" not in given else given,
    ],
}


def _wider(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    left, right = window
    return (left + 1 if left is not None and left >= 0 else left), right


@pytest.mark.slow
@pytest.mark.parametrize("number", MODULES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_call_fails(fault: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, number)
    module = sys.modules[MODULES[number][0]]
    (name,) = (name for name in vars(module) if name.startswith("flash_attn_"))
    right = getattr(module, name)

    def wrong(*args: Any, **given: Any) -> Any:
        for change in FAULTS[fault]:
            given = change(given)
        drops = given.pop("drops", False)
        found = right(*args, **given)
        return (found[0], torch.full_like(found[1], torch.inf)) if drops and isinstance(found, tuple) else found

    for case in cases(number):
        check_attention(FlashAttention(), case)
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        for case in cases(number):
            check_attention(FlashAttention(), case)


@pytest.mark.parametrize("number", [3, 4])
def test_what_lies_behind_the_last_key_must_be_cleared_for_versions_that_read_whole_tiles(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, number)
    (case, *_) = cases(number, block_size=128)
    check_attention(FlashAttention(), case)
    monkeypatch.setattr("turnout.plugins.attention.flash_attn.WHOLE_TILES", 1024)
    with pytest.raises(AssertionError, match="off by inf"):
        check_attention(FlashAttention(), case)


def refusals(layer: LayerSpec, block_size: int = 16, device: str = "cuda") -> list[str]:
    asked = (layer,), block_size, torch.float16, torch.device(device), "auto"
    return FlashAttention.capabilities.refusals(*asked) + FlashAttention.refusals(*asked)


@pytest.mark.parametrize(
    ("installed", "card", "number"),
    [
        ((2, 3, 4), (9, 0), 3),
        ((2, 4), (9, 0), 4),
        ((2, 3, 4), (10, 0), 4),
        ((2, 3, 4), (8, 6), 2),
        ((2,), (9, 0), 2),
        ((2, 3, 4), (12, 0), 2),
    ],
)
def test_the_newest_version_made_for_the_card_is_taken_and_named(
    installed: tuple[int, ...], card: tuple[int, int], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *installed)
    monkeypatch.setattr(flash_versions, "card", lambda: card)
    assert FlashAttention.kernels().startswith(f"FlashAttention {number} (")


def test_an_installed_version_that_the_card_does_not_run_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 3, 4)
    monkeypatch.setattr(flash_versions, "card", lambda: (8, 6))
    monkeypatch.setattr(flash_versions, "card_name", lambda: "an A10 (compute capability 8.6)")
    assert refusals(LAYERS[0]) == [
        "FlashAttention 3 and FlashAttention 4 do not run on an A10 (compute capability 8.6)"
    ]
    assert FlashAttention.kernels() == ""


def test_without_any_version_the_reason_is_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert "pip install flash-attn" in (FlashAttention.obstacle() or "")
    install(monkeypatch, 2)
    assert FlashAttention.obstacle() is None


@pytest.mark.parametrize(
    ("number", "card", "layer", "block_size", "reasons"),
    [
        (2, (8, 0), LAYERS[0], 16, ["blocks.block_size is 16, FlashAttention 2 takes multiples of 256"]),
        (2, (8, 0), LAYERS[0], 512, []),
        (3, (9, 0), LAYERS[3], 16, []),
        (3, (9, 0), replace(LAYERS[0], head_dim=128, v_head_dim=64), 16, ["head_dim is 128 with values of 64"]),
        (3, (9, 0), replace(LAYERS[0], head_dim=192, v_head_dim=128), 16, []),
        (4, (10, 0), replace(LAYERS[0], head_dim=256), 16, ["head_dim is 256"]),
        (4, (9, 0), replace(LAYERS[0], head_dim=256), 16, []),
        (4, (9, 0), replace(LAYERS[0], head_dim=72), 16, ["head_dim is 72"]),
    ],
)
def test_the_rules_of_each_version_are_reasons(
    number: int,
    card: tuple[int, int],
    layer: LayerSpec,
    block_size: int,
    reasons: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, number)
    monkeypatch.setattr(flash_versions, "card", lambda: card)
    found = refusals(layer, block_size)
    assert len(found) == len(reasons) and all(map(str.startswith, found, reasons)), found


def test_asking_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file of a version is looked for; neither it nor its package runs."""
    for package in ("flash_attn", "flash_attn/cute"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert [version.number for version in flash_versions.installed()] == [4]


del Emulated, Selected, AttentionContract
