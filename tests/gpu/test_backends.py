"""The attention contract on a GPU, for every registered backend that runs on one."""

from __future__ import annotations

import pytest
import torch

from turnout.compose import plugins
from turnout.core.interfaces import Auto
from turnout.testing import AttentionContract

pytestmark = pytest.mark.gpu
HERE = torch.cuda.is_available()
BACKENDS = {
    choice.name: choice.component
    for choice in plugins.load().choices.values()
    if choice.slot == "attention"
    and choice.component is not Auto
    and "cuda" in (choice.component.capabilities.devices or {"cuda"})  # type: ignore[attr-defined]
}

if HERE:
    for backend, component in BACKENDS.items():
        suite = {"make": component, "device": "cuda", "__doc__": f"attention={backend}"}
        globals()[f"Test_{backend}"] = type(f"Test_{backend}", (AttentionContract,), suite)


@pytest.mark.skipif(HERE, reason="there is a GPU: the whole contract runs")
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_its_contract_needs_a_gpu(backend: str) -> None:
    pytest.skip(f"attention={backend} is tried on a GPU, and there is none")
