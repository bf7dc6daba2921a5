"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import turnout.server  # noqa: F401  before torch: it says how torch's threads wait for each other

import torch  # isort: skip

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, which looks then


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    yield


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The demo model's folder: SmolLM2-135M-Instruct, converted once and cached as for any user."""
    from turnout.core import plugins
    from turnout.plugins.loader import checkpoint

    return checkpoint.resolve("smollm2", plugins.load().formats())
