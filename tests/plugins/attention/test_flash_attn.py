"""attention=flash_attn, on emulations of versions 2, 3 and 4: each must keep the contract, and faults must be caught."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import flash
from models import one_thread

from turnout.core import Capabilities, LayerSpec
from turnout.core.testing import AttentionContract
from turnout.plugins.attention import flash_versions
from turnout.plugins.attention.flash_attn import FlashAttention
from turnout.testing.attention import AttentionCase, check_attention

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


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class TestVersion2(Emulated):
    number = 2


class TestVersion3(Emulated):
    number = 3


class TestVersion4(Emulated):
    number = 4


del Emulated, AttentionContract
