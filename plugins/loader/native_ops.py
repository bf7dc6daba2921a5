"""Small operations between matrix products, exchanged for native kernels where these compute the same.

A model's modules are recognised by what they compute, not by name: each candidate is tried on random numbers beside
the kernel, and stays as it is unless the results agree. Only float32 on a CPU is exchanged.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from turnout.kernels import cpu as native
from turnout.kernels.cpu.linear import PackedEmbedding, PackedLinear
from turnout.plugins.loader.fuse import FloatPart, Part

TOLERANCE = 1e-5  # of the largest value


class Direct(nn.Module):
    """A module whose call is its forward: nobody hooks a served model, and a call costs microseconds a layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class RMSNorm(Direct):
    """A norm over the last dimension by the native kernel; `plus` is added to the weight (Gemma stores it less one)."""

    def __init__(self, weight: Tensor, eps: float, plus: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.plus = eps, plus
        self._run, self._threads = native.library().turnout_rms_norm, torch.get_num_threads()

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        dim = x.shape[-1]
        rows = x.numel() // dim
        self._run(x.data_ptr(), self.weight.data_ptr(), out.data_ptr(), rows, dim, self.eps, self.plus, self._threads)
        return out


class GatedMLP(Direct):
    """down(silu(gate(x)) * up(x)), gate and up in one product, the middle by the native kernel."""

    def __init__(self, gate: Part, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self._run, self._threads = native.library().turnout_silu_mul, torch.get_num_threads()

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_proj.shared.linear(x).contiguous()
        dim = both.shape[-1] // 2
        out = both.new_empty(*both.shape[:-1], dim)
        self._run(both.data_ptr(), out.data_ptr(), both.numel() // (2 * dim), dim, self._threads)
        found: Tensor = self.down_proj(out)
        return found


class Rotary:
    """In place of a model file's `apply_rotary_pos_emb`: the same function, by the native kernel where it fits."""

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._original = original
        self._run, self._threads = native.library().turnout_rotate, torch.get_num_threads()

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """q, k: [1, heads, T, dim]; cos, sin: [1, T, dim]."""
        _, heads, num, dim = q.shape
        fits = q.shape[0] == 1 and cos.shape == (1, num, dim) and cos.is_contiguous() and sin.is_contiguous()
        packed = all(x.stride(3) == 1 and x.stride(1) == dim for x in (q, k))
        if rest or more or not fits or not packed or q.dtype != torch.float32 or cos.dtype != torch.float32:
            return self._original(q, k, cos, sin, *rest, **more)
        made = [torch.empty(1, num, x.shape[1], dim) for x in (q, k)]
        self._run(
            q.data_ptr(), k.data_ptr(), made[0].data_ptr(), made[1].data_ptr(), cos.data_ptr(), sin.data_ptr(),
            num, heads, k.shape[1], dim, q.stride(2), k.stride(2), self._threads,
        )  # fmt: skip
        return made[0].transpose(1, 2), made[1].transpose(1, 2)


def exchange(net: Any) -> int:
    """Exchange what can be, in place; how many modules were. Raises NativeError where the kernels do not build."""
    done = 0
    embeddings = {name: module for name, module in net.named_modules() if isinstance(module, nn.Embedding)}
    for make in (_part, _mlp, _norm, _linear):
        for name, module in list(net.named_modules()):
            made = make(module)
            if made is not None:
                if make is _linear:
                    _share_embedding(net, embeddings, module, made)
                parent, _, child = name.rpartition(".")
                setattr(net.get_submodule(parent), child, made)
                done += 1
    return done + sum(_rotary(module) for module in net.modules())


def _rotary(module: nn.Module) -> int:
    """Let the module's own forward see our function under that name. Its file, and other models, are left alone."""
    forward = inspect.unwrap(type(module).forward)
    original = forward.__globals__.get("apply_rotary_pos_emb")
    if original is None or "apply_rotary_pos_emb" not in forward.__code__.co_names or not _rotates(original):
        return 0
    scope = forward.__globals__ | {"apply_rotary_pos_emb": Rotary(original)}
    twin = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    twin.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(twin, module)
    return 1


@functools.cache
def _rotates(original: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Whether a model file's function is the rotation our kernel computes."""
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 3, heads, 16, generator=made).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn(1, 3, 16, generator=made) for _ in range(2))
    try:
        expected = original(q, k, cos, sin)
    except (TypeError, RuntimeError):
        return False  # it takes other arguments
    got = Rotary(original)(q, k, cos, sin)
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, got, strict=True))


def _norm(module: nn.Module) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    plain = isinstance(weight, nn.Parameter) and weight.dim() == 1 and [*module._parameters] == ["weight"]
    if not plain or not isinstance(eps, float) or [*module.children()] or isinstance(module, RMSNorm):
        return None
    assert isinstance(weight, nn.Parameter)
    made = [RMSNorm(weight.data, eps, plus) for plus in (0.0, 1.0)]
    return next((one for one in made if _same(module, one, len(weight))), None)


def _part(module: nn.Module) -> Part | None:
    if not isinstance(module, FloatPart):
        return None
    shared = module.shared
    if type(shared.linear) is nn.Linear:
        shared.linear = _packed(shared.linear)
    return Part(shared, module.index)


def _linear(module: nn.Module) -> PackedLinear | None:
    return _packed(module) if type(module) is nn.Linear else None


def _packed(layer: nn.Linear) -> PackedLinear:
    return PackedLinear(layer.weight.data, None if layer.bias is None else layer.bias.data)


def _share_embedding(net: Any, embeddings: dict[str, nn.Embedding], layer: nn.Module, made: nn.Module) -> None:
    """Where `layer` and one of the embeddings are one tensor, that embedding reads from the packed form from now on."""
    assert isinstance(layer, nn.Linear) and isinstance(made, PackedLinear)
    for name, module in embeddings.items():
        if module.weight.data_ptr() == layer.weight.data_ptr():
            ids = torch.arange(7) * 13 % module.num_embeddings
            plain, given = module.weight.data[ids], module(ids)
            scale = float(getattr(module, "embed_scale", 1.0))
            if given.shape == plain.shape and torch.equal(given, plain * scale):
                parent, _, child = name.rpartition(".")
                setattr(net.get_submodule(parent), child, PackedEmbedding(made, scale))


def _mlp(module: nn.Module) -> nn.Module | None:
    names = {name for name, _ in module.named_children()} - {"act_fn"}
    gate = getattr(module, "gate_proj", None)
    if names != {"gate_proj", "up_proj", "down_proj"} or not isinstance(gate, Part):
        return None
    up, down = module.get_submodule("up_proj"), module.get_submodule("down_proj")
    module.down_proj = nn.Identity()  # a layer that rounds its input makes a step of a tiny difference
    same = _same(module, GatedMLP(gate, up, module.down_proj), gate.in_features)
    module.down_proj = down
    return GatedMLP(gate, up, down) if same else None


@torch.inference_mode()
def _same(old: nn.Module, new: nn.Module, dim: int) -> bool:
    """Whether both compute the same for ordinary, tiny and huge inputs."""
    x = torch.randn(1, 5, dim, generator=torch.Generator().manual_seed(0))
    x[0, 1] *= 1e-4
    x[0, 2] *= 1e3
    expected, got = old(x), new(x)
    scale = expected.abs().amax(-1, keepdim=True)
    return expected.shape == got.shape and bool(((expected - got).abs() <= TOLERANCE * scale + 1e-12).all())
