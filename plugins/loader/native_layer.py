"""A whole decoder layer around its attention in two native calls.

In a small decode step the weights' way from memory is all the work, and what Python does between two products is felt.
A layer is recognised by its parts, which `native_ops` has exchanged already, whatever kind its weights are as long as
they come with a native kernel (`NativeProduct`), and kept only if it computes what the model's own code computes; with
other arguments that code runs as before. Why a layer was not recognised is said, too.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turnout.core.optional import DequantizingLinear, NativeProduct
from turnout.kernels import cpu as native
from turnout.kernels.cpu.linear import FLOATS, PackedLinear
from turnout.plugins.loader.fuse import Part
from turnout.plugins.loader.native_ops import GatedMLP, RMSNorm
from turnout.plugins.loader.probe import ATTEND

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # Qwen3's: over each head
# The places of a layer's norms, in `Layer` of layers.cpp, by the names transformers gives them
PLAIN = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
SANDWICH = {  # Gemma 2's: what attention and MLP add is normed as well
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
TOLERANCE = 1e-4  # of the largest value, where products do not round
ROUNDED = 0.05  # where they may
ROWS = 70  # of the trial: more than a tile, and none


class Parts(NamedTuple):
    """What a decoder layer is made of."""

    qkv: Any  # of the products, each a NativeProduct
    o: Any
    gate_up: Any
    down: Any
    norms: dict[str, RMSNorm]  # by their place in `Layer`
    head_dim: int
    heads: int
    kv_heads: int
    activation: int
    multiplier: float  # of what attention and MLP add

    @property
    def products(self) -> tuple[Any, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class NativeForward:
    """In place of a decoder layer's `forward`, for hidden states of one float type."""

    def __init__(self, layer: Any, parts: Parts, dtype: torch.dtype) -> None:
        self._kept = parts  # the pointers below live as long as these
        heads, kv_heads, head_dim = parts.heads, parts.kv_heads, parts.head_dim
        pointers = [pointer for product in parts.products for pointer in product.native_product()]
        self._layer = native.Layer(*pointers)
        for place, norm in parts.norms.items():
            setattr(self._layer, place, norm.struct())
        self._layer.dim, self._layer.hidden = parts.o.out_features, parts.down.in_features
        self._layer.heads, self._layer.kv_heads, self._layer.head_dim = heads, kv_heads, head_dim
        self._layer.threads, self._layer.dtype = torch.get_num_threads(), FLOATS.index(dtype)
        self._layer.activation, self._layer.multiplier = parts.activation, parts.multiplier
        self._index, self._dim, self._dtype = layer.self_attn.layer_idx, parts.o.out_features, dtype
        self._q, self._kv = (heads, head_dim), (kv_heads, head_dim)
        self._original = layer.forward
        library = native.library()
        self._before, self._after = library.turnout_before_attention, library.turnout_after_attention

    def __call__(self, hidden_states: Tensor, *rest: Any, **options: Any) -> Any:
        attend: Any = options.get(ATTEND)
        angles: Any = options.get("position_embeddings")
        plain = not rest and attend is not None and options.get("attention_mask") is None
        if not plain or not self._fits(hidden_states, angles):
            return self._original(hidden_states, *rest, **options)
        rows, (cos, sin), dtype = hidden_states.shape[1], angles, self._dtype
        layer, x = ctypes.byref(self._layer), hidden_states.data_ptr()
        q = torch.empty(rows, *self._q, dtype=dtype)
        k, v = torch.empty(rows, *self._kv, dtype=dtype), torch.empty(rows, *self._kv, dtype=dtype)
        native.check(
            self._before(layer, x, cos.data_ptr(), sin.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), rows)
        )
        attended = attend(self._index, q, k, v, None).contiguous()
        assert attended.dtype == dtype and attended.numel() == q.numel(), "attention answers as it was asked"
        out = torch.empty(1, rows, self._dim, dtype=dtype)
        native.check(self._after(layer, x, attended.data_ptr(), out.data_ptr(), rows))
        return out

    def _fits(self, x: Tensor, angles: Any) -> bool:
        """Whether these are the tensors the kernels take: one flat batch of their type, one angle a position."""
        if x.shape[0] != 1 or x.shape[2] != self._dim or not isinstance(angles, tuple):
            return False
        shape = (1, x.shape[1], self._q[1])
        same = all(t.dtype == self._dtype and t.is_contiguous() and t.device.type == "cpu" for t in (x, *angles))
        return same and all(angle.shape == shape for angle in angles)


def exchange_layers(net: nn.Module, dtype: torch.dtype) -> str:
    """Give each decoder layer that can have one its native forward; says how many have, and why others have not."""
    compared: set[type] = set()
    reasons: Counter[str] = Counter()
    done = 0
    for module in net.modules():
        if isinstance(getattr(module, "self_attn", None), nn.Module):
            reason = _exchanged(module, dtype, compared)
            done += reason is None
            reasons.update(() if reason is None else (f"{type(module).__name__} {reason}",))
    why = "; ".join(f"{count} are not: {reason}" for reason, count in reasons.items())
    return f"native layers: {done} of {done + reasons.total()} decoder layers" + (f"; {why}" if why else "")


def _exchanged(layer: nn.Module, dtype: torch.dtype, compared: set[type]) -> str | None:
    """Why the layer keeps its own code; None: it has the native one. `compared`: kinds of layers of which one was compared
    in floats already, since its products round."""
    parts = _parts(layer)
    if isinstance(parts, str):
        return parts
    exact = dtype == torch.float32 and all(isinstance(product, PackedLinear) for product in parts.products)
    if not exact and type(layer) not in compared:
        if not all(isinstance(product, DequantizingLinear) for product in parts.products):
            return "has products that can't be compared in floats"
        with _in_floats(layer):
            wide = _parts(layer)
            assert isinstance(wide, Parts)
            if not _same(layer, NativeForward(layer, wide, torch.float32), wide, torch.float32, TOLERANCE):
                return "computes something else around its products"
        compared.add(type(layer))
    made = NativeForward(layer, parts, dtype)
    if not _same(layer, made, parts, dtype, TOLERANCE if exact else ROUNDED):
        return "computes something else around its products" if exact else "computes something else than its kind"
    layer.forward = made
    return None


def _parts(layer: Any) -> Parts | str:
    """The parts of a decoder layer; or why it has not those of a layer that the kernels know."""
    attention, mlp = layer.self_attn, getattr(layer, "mlp", None)
    names = {name for name, _ in layer.named_children()}
    places = next((p for p in (PLAIN, SANDWICH) if names == {"self_attn", "mlp", *p.values()}), None)
    if places is None:
        return f"is made of {', '.join(sorted(names))}"
    inside = {name for name, _ in attention.named_children()}
    if inside not in (PROJECTIONS, PROJECTIONS | HEAD_NORMS):
        return f"has attention made of {', '.join(sorted(inside))}"
    if not isinstance(mlp, GatedMLP):
        return f"has an MLP, {type(mlp).__name__}, that is no gated one with silu or tanh's gelu"
    norms = {place: getattr(layer, name) for place, name in places.items()}
    if inside > PROJECTIONS:
        norms |= {"q": attention.q_norm, "k": attention.k_norm}
    if odd := [type(norm).__name__ for norm in norms.values() if not isinstance(norm, RMSNorm)]:
        return f"has norms that are no RMS norms: {', '.join(sorted(set(odd)))}"
    if not isinstance(attention.q_proj, Part):
        return "has query, key and value layers that can't be joined"
    products = attention.q_proj.shared.linear, attention.o_proj, mlp.gate_proj.shared.linear, mlp.down_proj
    for product in products:
        if not isinstance(product, NativeProduct) or product.native_product() is None:
            return f"has weights without a native product: {type(product).__name__}"
    head_dim = getattr(attention, "head_dim", None)
    if not head_dim or any(norms[place].weight.shape != (head_dim,) for place in ("q", "k") if place in norms):
        return "does not say its head size" if not head_dim else "norms something else than heads"
    heads, kv_heads = (proj.out_features // head_dim for proj in (attention.q_proj, attention.k_proj))
    multiplier = float(getattr(layer, "residual_multiplier", 1.0))
    return Parts(*products, norms, head_dim, heads, kv_heads, mlp.activation, multiplier)


@contextmanager
def _in_floats(layer: Any) -> Iterator[None]:
    """Meanwhile every product is one of float32: a layer that rounds makes a step of a tiny difference, so what is around
    the products could not be compared closely."""
    attention, mlp = layer.self_attn, layer.mlp
    places = ((attention.q_proj.shared, "linear"), (attention, "o_proj"), (mlp.gate_proj.shared, "linear"))
    kept = [(place, name, getattr(place, name)) for place, name in (*places, (mlp, "down_proj"))]
    try:
        for place, name, linear in kept:
            setattr(place, name, PackedLinear(linear.dequantize().float(), linear.bias))
        yield
    finally:
        for place, name, linear in kept:
            setattr(place, name, linear)


@torch.inference_mode()
def _same(layer: Any, made: NativeForward, parts: Parts, dtype: torch.dtype, tolerance: float) -> bool:
    """Whether both give the same hidden states, attention replaced by a mixture of its arguments."""
    dice = torch.Generator().manual_seed(0)

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return q + 0.5 * k.repeat_interleave(group, 1) + 0.25 * v.repeat_interleave(group, 1) * (index + 1)

    for rows in (1, ROWS):
        x = torch.randn(1, rows, parts.o.out_features, generator=dice).to(dtype)
        angles = tuple(torch.randn(1, rows, parts.head_dim, generator=dice).to(dtype) for _ in range(2))
        options = {"attention_mask": None, "position_embeddings": angles, "use_cache": False, ATTEND: attend}
        try:
            expected = layer.forward(x, **options)
        except (TypeError, RuntimeError, ValueError, AssertionError):
            return False  # it takes other arguments
        got = made(x, **options)
        if not isinstance(expected, Tensor) or expected.shape != got.shape:
            return False
        if bool(((expected - got).abs() > tolerance * expected.abs().amax()).any()):
            return False
    return True
