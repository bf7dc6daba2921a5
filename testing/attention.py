"""The truth about attention, in float64 and one query at a time, and how far from it a backend may be.

The yardstick is plain PyTorch: the formula written out over contiguous tensors, each operation rounded to the dtype
served. A backend may err at most twice as much (the rule of FlashAttention's own tests).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.core.interfaces import AttentionBackend
from turnout.core.types import LayerSpec
from turnout.testing.attention_scene import AttentionCase, Part, Scene

TIMES = 2.0  # the error of plain PyTorch


class Compared(NamedTuple):
    """What a backend made of a case, beside the truth and what plain PyTorch makes of it: each [T, heads, v_head_dim]."""

    got: Tensor  # the case's dtype
    want: Tensor  # float64
    plain: Tensor  # the case's dtype

    @property
    def error(self) -> float:
        """The largest distance from the truth; infinite where something is NaN."""
        return _distance(self.got, self.want)

    @property
    def allowed(self) -> float:
        """Twice the largest error of plain PyTorch, and a rounding of the largest output: plain may be right by luck."""
        largest = self.want.abs().max().item() if self.want.numel() else 0.0
        return TIMES * _distance(self.plain, self.want) + torch.finfo(self.plain.dtype).eps * largest

    def check(self) -> None:
        """Raises AssertionError where the rule is broken."""
        if self.got.shape != self.want.shape or self.got.dtype != self.plain.dtype:
            wanted = f"{tuple(self.want.shape)} of {self.plain.dtype}"
            raise AssertionError(f"the output is {tuple(self.got.shape)} of {self.got.dtype}, not {wanted}")
        if not self.error <= self.allowed:
            away = (self.got.double() - self.want).abs().nan_to_num(math.inf)
            row, head, _ = (int(i) for i in torch.unravel_index(away.argmax(), away.shape))
            raise AssertionError(f"off by {self.error:.2g}, allowed {self.allowed:.2g}; most at row {row}, head {head}")


def attention_oracle(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, sinks: Tensor | None) -> Tensor:
    """q: [queries, heads, dim], the last ones of a sequence whose keys and values are k, v: [keys, kv_heads, dim].

    Query i sits at position keys - queries + i and sees the keys up to there, the last `window` of them. float64 out.
    """
    num_q, num_k, group = q.shape[0], k.shape[0], layer.num_heads // layer.num_kv_heads
    out = torch.zeros(num_q, layer.num_heads, v.shape[-1], dtype=torch.float64)
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    for i in range(num_q):
        last = num_k - num_q + i
        first = 0 if layer.window is None else max(0, last - layer.window + 1)
        if last < first:
            continue  # sees nothing: zeros
        logits = torch.einsum("hd,khd->hk", q[i], k[first : last + 1]) * layer.scale
        if layer.softcap is not None:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        if sinks is not None:
            logits = torch.cat((logits, sinks.double().cpu()[:, None]), 1)
        weights = torch.softmax(logits, 1)[:, : last - first + 1]
        out[i] = torch.einsum("hk,khd->hd", weights, v[first : last + 1])
    return out


def plain_attention(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, sinks: Tensor | None) -> Tensor:
    """The same in q's dtype, every operation of PyTorch rounding to it. Returns [queries, heads, dim] in q's dtype."""
    num_q, num_k, group = q.shape[0], k.shape[0], layer.num_heads // layer.num_kv_heads
    q, k, v = q.transpose(0, 1), k.repeat_interleave(group, 1).transpose(0, 1), v.repeat_interleave(group, 1)
    logits = (q @ k.transpose(1, 2)) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
    if layer.window is not None:
        seen = seen.triu(num_k - num_q - layer.window + 1)
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.to(q)[:, None, None].expand(-1, num_q, 1)), 2)
    weights = torch.softmax(logits, -1)[..., :num_k].masked_fill(~seen, 0.0)
    return (weights @ v.transpose(0, 1)).transpose(0, 1)


def compare_attention(backend: AttentionBackend[Any, Any], case: AttentionCase, seed: int = 0) -> Compared:
    """Run the case and its yardsticks. With an 8-bit cache those two are given the keys and values it keeps.

    Earlier keys go in by the backend's own path, as one prefill; blocks are shuffled, and unused ones hold poison.
    """
    scene = Scene(backend, case, seed)
    return compared(scene, scene.attend())


def compared(scene: Scene, got: Tensor, parts: Sequence[Part] | None = None) -> Compared:
    """What a call answered beside what it should have, up to its part's last key; all requests' last parts, if not said."""
    wants, plains = [], []
    for request, first, end in scene.last if parts is None else parts:
        known = len(request.keys) - len(request.queries)
        q = request.queries[first - known :][: end - first] if parts is not None else request.queries
        k, v = scene.kept(request.keys[:end]), scene.kept(request.values[:end])
        wants.append(attention_oracle(q, k, v, scene.layer, scene.sinks))
        plains.append(plain_attention(q, k.to(q.dtype), v.to(q.dtype), scene.layer, scene.sinks))
    return Compared(got.cpu(), torch.cat(wants), torch.cat(plains))


def scale_error(scene: Scene) -> float:
    """How far the scale that fits a backend's answers best is from the layer's, as a share of it: least squares on the
    derivative of the truth, which averages the rounding of coarse dtypes away."""
    got = scene.attend().cpu().double()

    def truth(factor: float) -> Tensor:
        layer = replace(scene.layer, scale=scene.layer.scale * factor)
        return torch.cat(
            [attention_oracle(r.queries, scene.kept(r.keys), scene.kept(r.values), layer, None) for r in scene.requests]
        )

    slope = (truth(1.01) - truth(0.99)) / 0.02
    return float(((got - truth(1.0)) * slope).sum() / (slope * slope).sum())


def run_attention(backend: AttentionBackend[Any, Any], case: AttentionCase, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The backend's output and the oracle's, [T, heads, v_head_dim]."""
    found = compare_attention(backend, case, seed)
    return found.got, found.want


def check_attention(backend: AttentionBackend[Any, Any], case: AttentionCase, seed: int = 0) -> None:
    """Raises AssertionError where the backend errs more than twice as much as plain PyTorch in the same dtype."""
    compare_attention(backend, case, seed).check()


def _distance(x: Tensor, want: Tensor) -> float:
    away = (x.double() - want).abs().nan_to_num(math.inf)
    return away.max().item() if away.numel() else 0.0
