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


torch.set_num_threads(1)  # small products only wait for a second one, and pytest-xdist has a process a core


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """After a test that asked for more. Native layers keep the number they were loaded with."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The demo model's folder: SmolLM2-135M-Instruct, converted once and cached as for any user."""
    from turnout.compose import plugins
    from turnout.plugins.loader import checkpoint

    return checkpoint.resolve("smollm2", plugins.load().formats())
