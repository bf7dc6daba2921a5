"""Small operations between matrix products, exchanged for native kernels where these compute the same.

A model's modules are recognised by what they compute, not by name: each candidate is tried in float32 on random numbers
beside the kernel, and stays as it is unless the results agree. It is for floats of 32 and 16 bits on a CPU; the kernels
compute in float32 and round their result once.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from turnout.kernels import cpu as native
from turnout.kernels.cpu.linear import FLOATS, PackedEmbedding, PackedLinear
from turnout.plugins.loader.fuse import FloatPart, Part

TOLERANCE = 1e-5  # of the largest value
SILU, GELU_TANH = 0, 1  # `Activation` of layers.cpp


class Direct(nn.Module):
    """A module whose call is its forward: nobody hooks a served model, and a call costs microseconds a layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class RMSNorm(Direct):
    """A norm over the last dimension by the native kernel; `plus` is added to the weight (Gemma stores it less one)."""

    def __init__(self, weight: Tensor, eps: float, plus: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._wide = weight.float().contiguous()  # what the kernels read
        self.eps, self.plus = eps, plus
        self._run, self._threads = native.library().turnout_rms_norm, torch.get_num_threads()

    def struct(self) -> native.Norm:
        """As kernels of a whole layer read it."""
        return native.Norm(self._wide.data_ptr(), self.eps, self.plus)

    def forward(self, x: Tensor) -> Tensor:
        dim = len(self.weight)
        assert x.dtype in FLOATS and x.device.type == "cpu" and x.shape[-1] == dim, (
            f"a native norm of {dim} was given {list(x.shape)} of {x.dtype} on {x.device}"
        )
        x = x.contiguous()
        out = torch.empty_like(x)
        native.check(
            self._run(
                x.data_ptr(), self._wide.data_ptr(), out.data_ptr(), x.numel() // dim, dim, self.eps, self.plus,
                FLOATS.index(x.dtype), self._threads,
            )
        )  # fmt: skip
        return out


class GatedMLP(Direct):
    """down(activation(gate(x)) * up(x)), gate and up in one product, the middle by the native kernel."""

    def __init__(self, gate: Part, up: nn.Module, down: nn.Module, activation: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.activation = gate, up, down, activation
        self._run, self._threads = native.library().turnout_activate, torch.get_num_threads()

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_proj.shared.linear(x).contiguous()
        dim = both.shape[-1] // 2
        out = both.new_empty(*both.shape[:-1], dim)
        rows, kind = both.numel() // (2 * dim), FLOATS.index(both.dtype)
        native.check(self._run(both.data_ptr(), out.data_ptr(), rows, dim, kind, self.activation, self._threads))
        found: Tensor = self.down_proj(out)
        return found


def exchange(net: Any) -> int:
    """Exchange what can be, in place; how many modules were. Raises NativeError where the kernels do not build."""
    done = 0
    embeddings = {name: module for name, module in net.named_modules() if isinstance(module, nn.Embedding)}
    for make in (_mlp, _part, _norm, _linear):
        for name, module in list(net.named_modules()):
            made = make(module)
            if made is not None:
                if make is _linear:
                    _share_embedding(net, embeddings, module, made)
                net.set_submodule(name, made)
                done += 1
    return done


def _norm(module: nn.Module) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    plain = isinstance(weight, nn.Parameter) and weight.dim() == 1 and [*module._parameters] == ["weight"]
    if not plain or not isinstance(eps, float) or [*module.children()] or isinstance(module, RMSNorm):
        return None
    assert isinstance(weight, nn.Parameter)
    made = [RMSNorm(weight.data, eps, plus) for plus in (0.0, 1.0)]
    wide = deepcopy(module).float()
    return next((one for one in made if _same(wide, one, len(weight))), None)


def _part(module: nn.Module) -> Part | None:
    if not isinstance(module, FloatPart):
        return None
    shared = module.shared
    if type(shared.linear) is nn.Linear:
        if shared.linear.weight.dtype not in FLOATS:
            return None
        shared.linear = _packed(shared.linear)
    return Part(shared, module.index)


def _linear(module: nn.Module) -> PackedLinear | None:
    return _packed(module) if type(module) is nn.Linear and module.weight.dtype in FLOATS else None


def _packed(layer: nn.Linear) -> PackedLinear:
    return PackedLinear(layer.weight.data, None if layer.bias is None else layer.bias.data)


def _share_embedding(net: Any, embeddings: dict[str, nn.Embedding], layer: nn.Module, made: nn.Module) -> None:
    """Where `layer` and one of the embeddings are one tensor, that embedding reads from the packed form from now on."""
    assert isinstance(layer, nn.Linear) and isinstance(made, PackedLinear)
    for name, module in embeddings.items():
        if module.weight.data_ptr() == layer.weight.data_ptr():
            ids = torch.arange(7) * 13 % module.num_embeddings
            shared = PackedEmbedding(made, float(getattr(module, "embed_scale", 1.0)))
            if torch.equal(module(ids), shared(ids)):
                net.set_submodule(name, shared)


class _Identity(nn.Module):
    """In place of a product whose weights do not matter: what is around it can be compared closely."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.in_features = self.out_features = size

    def forward(self, x: Tensor) -> Tensor:
        return x


def _mlp(module: nn.Module) -> nn.Module | None:
    """An MLP whose products are identities shows its activation alone, whatever kind its weights are."""
    names = {name for name, _ in module.named_children()} - {"act_fn"}
    gate = getattr(module, "gate_proj", None)
    if names != {"gate_proj", "up_proj", "down_proj"} or not isinstance(gate, Part):
        return None
    up, down = module.get_submodule("up_proj"), module.get_submodule("down_proj")
    size = gate.out_features
    module.gate_proj = module.up_proj = module.down_proj = _Identity(size)
    x = _trial(size)
    activation = next((a for a in (SILU, GELU_TANH) if _close(_tried(module, x), _activated(x, a))), None)
    module.gate_proj, module.up_proj, module.down_proj = gate, up, down
    return None if activation is None else GatedMLP(gate, up, down, activation)


def _activated(x: Tensor, activation: int) -> Tensor:
    """activation(x) * x by the kernel; x: contiguous float32 [..., dim]."""
    both, out = torch.cat([x, x], -1), torch.empty_like(x)
    dim = x.shape[-1]
    native.check(
        native.library().turnout_activate(
            both.data_ptr(), out.data_ptr(), x.numel() // dim, dim, 0, activation, torch.get_num_threads()
        )
    )
    return out


def _trial(dim: int) -> Tensor:
    """Ordinary, tiny and huge inputs."""
    x = torch.randn(1, 5, dim, generator=torch.Generator().manual_seed(0))
    x[0, 1] *= 1e-4
    x[0, 2] *= 1e3
    return x


@torch.inference_mode()
def _tried(module: nn.Module, x: Tensor) -> Tensor | None:
    """What the module makes of x; None: it takes other arguments."""
    try:
        found = module(x)
    except (TypeError, RuntimeError, ValueError):
        return None
    return found if isinstance(found, Tensor) else None


@torch.inference_mode()
def _same(old: nn.Module, new: nn.Module, dim: int) -> bool:
    """Whether both compute the same."""
    x = _trial(dim)
    return _close(_tried(old, x), new(x))


def _close(expected: Tensor | None, got: Tensor) -> bool:
    if expected is None or expected.shape != got.shape:
        return False
    scale = expected.abs().amax(-1, keepdim=True)
    return bool(((expected - got).abs() <= TOLERANCE * scale + 1e-12).all())
