"""A whole decoder layer around its attention in two native calls.

In a small decode step the weights' way from memory is all the work, and what Python does between two products is felt.
A layer is recognised by its parts, which `native_ops` has exchanged already, whatever kind its weights are as long as
they come with a native kernel (`NativeProduct`), and kept only if it computes what the model's own code computes; with
other arguments that code runs as before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from turnout.core.optional import NativeProduct
from turnout.kernels import cpu as native
from turnout.kernels.cpu.linear import PackedLinear
from turnout.plugins.loader.fuse import Part
from turnout.plugins.loader.native_ops import GatedMLP, RMSNorm
from turnout.plugins.loader.probe import ATTEND

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOLERANCE = 1e-4  # of the largest value, where products do not round
ROUNDED = 0.05  # where they may
ROWS = 70  # of the trial: more than a tile, and none


class NativeForward:
    """In place of a decoder layer's `forward`."""

    def __init__(self, layer: Any, heads: int, kv_heads: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        o, down = attention.o_proj, mlp.down_proj
        linears = [attention.q_proj.shared.linear, o, mlp.gate_proj.shared.linear, down]
        self._kept = [*linears, first.weight, second.weight]  # the pointers below live as long as these
        head_dim = attention.q_proj.out_features // heads
        pointers = [pointer for linear in linears for pointer in linear.native_product()]
        norms = [norm.weight.data_ptr() for norm in (first, second)]
        sizes = [o.out_features, heads, kv_heads, head_dim, down.in_features, torch.get_num_threads()]
        self._layer = native.Layer(*pointers, *norms, *sizes, first.eps, first.plus, second.eps, second.plus)
        self._index, self._dim = attention.layer_idx, o.out_features
        self._shapes = (heads, head_dim), (kv_heads, head_dim)
        self._original = layer.forward
        library = native.library()
        self._before, self._after = library.turnout_before_attention, library.turnout_after_attention

    def __call__(self, hidden_states: Tensor, *rest: Any, **options: Any) -> Any:
        attend: Any = options.get(ATTEND)
        angles: Any = options.get("position_embeddings")
        rows = hidden_states.shape[1]
        plain = not rest and attend is not None and options.get("attention_mask") is None
        if not plain or not _fit(hidden_states, angles, self._shapes[0][1]):
            return self._original(hidden_states, *rest, **options)
        cos, sin = angles
        layer, x = ctypes.byref(self._layer), hidden_states.data_ptr()
        q, k, v = (
            torch.empty(rows, *self._shapes[0]),
            torch.empty(rows, *self._shapes[1]),
            torch.empty(rows, *self._shapes[1]),
        )
        self._before(layer, x, cos.data_ptr(), sin.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), rows)
        attended = attend(self._index, q, k, v, None).contiguous()
        out = torch.empty(1, rows, self._dim)
        self._after(layer, x, attended.data_ptr(), out.data_ptr(), rows)
        return out


def _fit(x: Tensor, angles: Any, head_dim: int) -> bool:
    """Whether these are the tensors the kernels take: one flat float32 batch, one angle a position."""
    if x.shape[0] != 1 or x.dtype != torch.float32 or not x.is_contiguous() or not isinstance(angles, tuple):
        return False
    shape = (1, x.shape[1], head_dim)
    return all(a.shape == shape and a.dtype == torch.float32 and a.is_contiguous() for a in angles)


def exchange_layers(net: nn.Module) -> int:
    """Give each decoder layer of the usual form its native forward; how many there were."""
    compared: set[type] = set()
    return sum(_exchanged(module, compared) for module in net.modules())


def _exchanged(module: nn.Module, compared: set[type]) -> bool:
    """`compared`: kinds of layers whose products round, one of which was compared in floats already."""
    parts = dict(module.named_children())
    attention, mlp = parts.get("self_attn"), parts.get("mlp")
    norms = [parts.get("input_layernorm"), parts.get("post_attention_layernorm")]
    usual = set(parts) == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if not usual or attention is None or [name for name, _ in attention.named_children()] != PROJECTIONS:
        return False
    q, o = attention.get_submodule("q_proj"), attention.get_submodule("o_proj")
    rms = all(isinstance(norm, RMSNorm) for norm in norms)
    if not (rms and isinstance(q, Part) and isinstance(mlp, GatedMLP)):
        return False
    head_dim = getattr(attention, "head_dim", None)
    linears = (q.shared.linear, o, mlp.gate_proj.shared.linear, mlp.get_submodule("down_proj"))
    if not head_dim or any(not isinstance(one, NativeProduct) or one.native_product() is None for one in linears):
        return False
    heads, kv_heads = (attention.get_submodule(name).out_features // head_dim for name in ("q_proj", "k_proj"))
    rounds = not all(isinstance(linear, PackedLinear) for linear in linears)
    if rounds and type(module) not in compared:
        with _in_floats(module):
            trial = NativeForward(module, heads, kv_heads)
            if not _same(module, trial, trial._dim, head_dim, TOLERANCE):
                return False
        compared.add(type(module))
    made = NativeForward(module, heads, kv_heads)
    if not _same(module, made, made._dim, head_dim, ROUNDED if rounds else TOLERANCE):
        return False
    module.forward = made
    return True


@contextmanager
def _in_floats(layer: Any) -> Iterator[None]:
    """Meanwhile every product is one of floats: a layer that rounds its input makes a step of a tiny difference, so
    what is around the products could not be compared closely."""
    attention, mlp = layer.self_attn, layer.mlp
    places = ((attention.q_proj.shared, "linear"), (attention, "o_proj"), (mlp.gate_proj.shared, "linear"))
    kept = [(place, name, getattr(place, name)) for place, name in (*places, (mlp, "down_proj"))]
    for place, name, linear in kept:
        if not isinstance(linear, PackedLinear):
            setattr(place, name, PackedLinear(linear.dequantize(), linear.bias))
    yield
    for place, name, linear in kept:
        setattr(place, name, linear)


@torch.inference_mode()
def _same(layer: Any, made: NativeForward, dim: int, head_dim: int, tolerance: float) -> bool:
    """Whether both give the same hidden states, attention replaced by a mixture of its arguments."""
    dice = torch.Generator().manual_seed(0)

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return q + 0.5 * k.repeat_interleave(group, 1) + 0.25 * v.repeat_interleave(group, 1) * (index + 1)

    for rows in (1, ROWS):
        x = torch.randn(1, rows, dim, generator=dice)
        angles = tuple(torch.randn(1, rows, head_dim, generator=dice) for _ in range(2))
        options = {"attention_mask": None, "position_embeddings": angles, "use_cache": False, ATTEND: attend}
        try:
            expected = layer.forward(x, **options)
        except (TypeError, RuntimeError, ValueError):
            return False  # it takes other arguments
        got = made(x, **options)
        if not isinstance(expected, Tensor) or expected.shape != got.shape:
            return False
        if bool(((expected - got).abs() > tolerance * expected.abs().amax()).any()):
            return False
    return True
