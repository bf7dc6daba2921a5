"""What a mode needs is asked before weights load, and refused with what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from models import save
from tape import Tape

from turnout.compose import plugins
from turnout.compose.build import build_engine
from turnout.compose.config import Config, resolve
from turnout.core import Capabilities, LayerSpec, ModelError, ModelInfo
from turnout.core.model import Limits
from turnout.plugins.loader import model as loading
from turnout.plugins.runner import LocalRunner

LIMITS = Limits(max_model_len=64)
ON = {kind: ModelInfo("", "", (), 64, 128, torch.float32, torch.device(kind), 0) for kind in ("cpu", "cuda")}


def silent(stage: str, share: float) -> None: ...


def prepared(mode: str, device: str = "cpu") -> ModelInfo:
    return LocalRunner(mode).prepare(ON[device], LIMITS, silent)


@pytest.fixture
def composed(tmp_path: Path, monkeypatch: Any) -> Any:
    import turnout.server.config  # noqa: F401  stores the schemas of commands

    plugins.load()
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("weights were read"))
    folder = save("llama", tmp_path)

    def make(*overrides: str) -> Config:
        with initialize_config_module("turnout.conf", version_base=None):
            return resolve(compose("serve", [f"model='{folder}'", "blocks.num_blocks=32", *overrides]))

    return make


def test_an_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="runner.mode must be one of eager, compile, graphs, got 'turbo'"):
        LocalRunner("turbo")


def test_only_a_model_to_be_traced_is_loaded_without_kernels_behind_torchs_back() -> None:
    assert not prepared("eager").traced and prepared("compile").traced


def test_graphs_without_a_gpu_are_refused_before_anything_else(composed: Any) -> None:
    with pytest.raises(ModelError, match="runner.mode=graphs replays CUDA graphs, and the model runs on cpu: choose"):
        build_engine(composed("runner.mode=graphs"))


def test_graphs_and_a_backend_that_cannot_refresh_plans_are_refused_before_weights_load(
    composed: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(LocalRunner, "recorder", Tape)
    with pytest.raises(ModelError, match="attention=torch cannot serve .*runner.mode=graphs replays decode steps"):
        build_engine(composed("runner.mode=graphs", "attention=torch"))


def test_a_backend_that_declares_graphs_is_no_reason_against_them() -> None:
    asked = ([LayerSpec(4, 2, 64, 0.125)], 16, torch.float32, torch.device("cuda"), "auto", True)
    assert len(Capabilities().refusals(*asked)) == 1
    assert Capabilities(graphs=True).refusals(*asked) == []


def test_compiling_without_a_compiler_is_refused_before_weights_load(composed: Any, monkeypatch: Any) -> None:
    from torch._inductor import cpp_builder, exc

    def nowhere() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nowhere)
    with pytest.raises(
        ModelError, match="runner.mode=compile can't be had here: .*C\\+\\+ compiler.*runner.mode=eager"
    ):
        build_engine(composed("runner.mode=compile"))


def test_compiling_for_a_gpu_needs_triton(monkeypatch: Any) -> None:
    from torch.utils import _triton

    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    with pytest.raises(ModelError, match="runner.mode=compile can't be had here: torch.compile needs Triton for cuda"):
        prepared("compile", "cuda")
