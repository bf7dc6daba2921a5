"""attention=flashinfer, on an emulation of its wrappers: it must keep the contract, and faults must be caught."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from emulated.infer import flashinfer
from models import one_thread

from turnout.core import Capabilities
from turnout.core.testing import AttentionContract
from turnout.plugins.attention.flashinfer import FlashInfer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class TestFlashInfer(AttentionContract):
    make = partial(FlashInfer, workspace_mb=16)
    device = "cpu"

    @property
    def capabilities(self) -> Capabilities:
        return replace(FlashInfer.capabilities, devices=None, needs=())

    def setup_method(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setitem(sys.modules, "flashinfer", flashinfer())
        super().setup_method()

    def teardown_method(self) -> None:
        self.patch.undo()


del AttentionContract
