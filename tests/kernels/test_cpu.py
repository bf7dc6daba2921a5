"""The native kernels: right against float64, whatever the shapes; built once, and honest where they cannot be."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import VOCAB, dense, reference, save
from torch import nn

from turnout.kernels import cpu as native
from turnout.kernels.cpu.linear import PackedLinear
from turnout.plugins.attention.cpu import CpuAttention
from turnout.plugins.loader.fuse import fuse
from turnout.plugins.loader.model import inspect, load
from turnout.plugins.loader.native_layer import NativeForward
from turnout.plugins.loader.native_ops import GatedMLP, RMSNorm, exchange
from turnout.plugins.quant.none import Unquantized

pytestmark = pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}")


@pytest.mark.parametrize(
    ("shape", "bias"), [((960, 576), False), ((33, 7), True), ((1, 64), False), ((50, 100), True)], ids=str
)
def test_packed_weights_give_the_same_products_whatever_the_number_of_rows(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(shape), torch.randn(shape[0]) if bias else None
    packed = PackedLinear(weight, offset)
    assert torch.equal(packed.weight, weight)
    for rows in (*range(1, 16), 29, 70, 150):
        x = torch.randn(1, rows, shape[1])
        exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        made = packed(x)
        torch.testing.assert_close(made.double(), exact, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(packed(x.transpose(1, 2).contiguous().transpose(1, 2)), made)
        assert torch.equal(PackedLinear(weight.t().contiguous().t(), offset)(x), made)
        assert all(torch.equal(made[0, row], packed(x[:, row : row + 1])[0, 0]) for row in range(rows))


class Norm(nn.Module):
    """As model files write it."""

    def __init__(self, plus: float, dim: int = 48) -> None:
        super().__init__()
        self.weight, self.eps, self.plus = nn.Parameter(torch.randn(dim)), 1e-5, plus

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.weight + self.plus)


class Block(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(48, 70, bias=False), nn.Linear(48, 70, bias=False)
        self.down_proj, self.act_fn = nn.Linear(70, 48, bias=False), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("num", [1, 3, 40])
@torch.inference_mode()
def test_exchanged_modules_compute_the_same_and_others_stay(num: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, num, 48)
    net = nn.ModuleDict(
        {
            "norm": Norm(0.0),
            "gemma": Norm(1.0),
            "layer_norm": nn.LayerNorm(48),
            "silu": Block(nn.SiLU()),
            "tanh": Block(nn.GELU(approximate="tanh")),
            "gelu": Block(nn.GELU()),
        }
    )
    before = {name: module(x) for name, module in net.items()}
    fuse(net)
    exchange(net)
    kinds = {name: type(module) for name, module in net.items()}
    assert kinds == {
        "norm": RMSNorm,
        "gemma": RMSNorm,
        "layer_norm": nn.LayerNorm,
        "silu": GatedMLP,
        "tanh": GatedMLP,
        "gelu": Block,
    }
    assert isinstance(net["gelu"].get_submodule("down_proj"), PackedLinear)
    for name, module in net.items():
        torch.testing.assert_close(module(x), before[name], atol=1e-5, rtol=1e-4)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TURNOUT_CACHE", str(tmp_path))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.slow
def test_the_kernels_are_compiled_once_and_kept(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.library()
    assert len(list((tmp_path / "native").iterdir())) == 1  # nothing half made beside it
    native.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    native.library()


def test_without_a_compiler_it_says_what_to_install(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "apt-get install g++" in str(native.obstacle())
    with pytest.raises(native.NativeError, match="no C"):
        native.library()
    assert CpuAttention.obstacle() == native.obstacle()


def test_without_a_compiler_the_best_library_that_came_along_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, other = native.library()._name, tmp_path / "x86-64-v4.so"
    (tmp_path / "x86-64-v3.so").symlink_to(here)
    monkeypatch.setattr(native.build, "PREBUILT", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native.build, "features", lambda: native.build.AVX2)
    native.library.cache_clear()
    try:
        assert native.obstacle() is None and "x86-64-v3" in native.kernels()
        assert native.library().turnout_attend is not None
        other.symlink_to(here)
        assert "x86-64-v3" in native.kernels(), "better, but not for this machine"
        monkeypatch.setattr(native.build, "features", lambda: native.build.AVX2 | native.build.AVX512)
        assert "x86-64-v4" in native.kernels()
        monkeypatch.setattr(native.build, "features", lambda: frozenset({"sse2"}))
        assert "compiled kernels are absent" in str(native.obstacle())
    finally:
        native.library.cache_clear()


def test_a_compiler_that_fails_is_quoted(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(native.NativeError, match="no such flag"):
        native.library()


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "granite", "smollm3"])
def test_native_layers_of_a_loaded_model_equal_transformers_own(arch: str, tmp_path: Path) -> None:
    """A step takes the native layers where a model has the usual form, and the model's own code elsewhere."""
    save(arch, tmp_path)
    model = load(inspect(str(tmp_path), "float32", "cpu"), Unquantized())
    forwards = [m.__dict__.get("forward") for m in model._net.modules()]
    native_layers = sum(isinstance(f, NativeForward) for f in forwards)
    assert native_layers == {"llama": 3, "mistral": 3, "qwen2": 3, "qwen3": 3, "gemma2": 3, "granite": 3}.get(
        arch, native_layers
    )
    for length in (1, 2, 4, 40):
        tokens = [(7 * i + 3) % VOCAB for i in range(length)]
        with torch.inference_mode():
            logits = model(
                torch.tensor(tokens), torch.arange(length), torch.arange(length), dense(model.info.layers, [length])
            )
        torch.testing.assert_close(logits, reference(tmp_path, tokens), atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_layer_with_other_arguments_runs_the_models_own_code(tmp_path: Path) -> None:
    save("llama", tmp_path)
    model = load(inspect(str(tmp_path), "float32", "cpu"), Unquantized())
    layer = next(m for m in model._net.modules() if isinstance(m.__dict__.get("forward"), NativeForward))
    called: list[int] = []
    layer.forward._original = lambda x, *rest, **options: called.append(x.shape[1]) or x  # type: ignore[union-attr]
    tokens = torch.arange(40)
    model(tokens, tokens, tokens[:1], dense(model.info.layers, [40]))
    assert called == []
    layer.forward(torch.zeros(1, 5, layer.self_attn.q_proj.in_features), position_embeddings=None)  # type: ignore[union-attr, operator]
    assert called == [5]
