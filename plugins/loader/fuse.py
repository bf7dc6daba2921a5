"""Sibling linear layers that read the same input, computed in one product: q/k/v, gate/up.

The model's own code goes on calling each layer. The first one computes all of them and keeps the others' outputs; a
sibling called with that very input takes its own, with any other input it computes alone. So nothing depends on the
order in which a model calls its layers; only the speed does.

What a layer's weights look like is not known here: a kind of layer that can be joined is a `JoiningLinear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from turnout.core.optional import JoiningLinear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Shared:
    """One layer in place of several, and the outputs not yet fetched."""

    def __init__(self, linear: Any, sizes: Sequence[int]) -> None:
        self.linear, self.sizes = linear, list(sizes)
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, index: int, x: Tensor) -> Tensor | None:
        """What layer `index` makes of `x`; None when it must be computed alone."""
        if index == 0:
            self._input = x
            self._outputs = dict(enumerate(torch.split(self.linear(x), self.sizes, -1)))
        elif self._input is not x:
            return None
        found = self._outputs.pop(index, None)
        if not self._outputs:
            self._input = None  # nothing is kept alive until the next step
        return found

    def rows(self, index: int) -> slice:
        """Its outputs, among those of all."""
        start = sum(self.sizes[:index])
        return slice(start, start + self.sizes[index])


class Part(nn.Module):
    """One of the layers, an output range of the shared one."""

    def __init__(self, shared: Shared, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = int(shared.linear.in_features), shared.sizes[index]
        self.shared, self.index = shared, index
        if index == 0 and type(shared.linear) is not nn.Linear:
            self.joined = shared.linear  # so that whoever walks the model finds its tensors, once

    def forward(self, x: Tensor) -> Tensor:
        found = self.shared.output(self.index, x)
        return self.shared.linear(x)[..., self.shared.rows(self.index)] if found is None else found


class FloatPart(Part):
    """One whose weight and bias, parts of the shared ones, are found by name as before."""

    def __init__(self, shared: Shared, index: int) -> None:
        super().__init__(shared, index)
        rows, bias = shared.rows(index), shared.linear.bias
        self.weight = nn.Parameter(shared.linear.weight[rows], requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias[rows], requires_grad=False))


def fuse(net: nn.Module) -> int:
    """Fuse the siblings of `net` that can be joined, in place; how many groups there were."""
    groups = 0
    for module in list(net.modules()):
        for names in SIBLINGS:
            layers = [layer for name in names if isinstance(layer := getattr(module, name, None), nn.Module)]
            made = _joined(layers) if len(layers) == len(names) else None
            if made is None:
                continue
            shared = Shared(made, [int(layer.out_features) for layer in layers])  # type: ignore[arg-type]
            kind = FloatPart if type(made) is nn.Linear else Part
            for index, name in enumerate(names):
                setattr(module, name, kind(shared, index))
            groups += 1
    return groups


def _joined(layers: list[nn.Module]) -> nn.Module | None:
    """One layer in place of these; None where there can be none."""
    first = layers[0]
    if any(type(layer) is not type(first) for layer in layers):
        return None
    if type(first) is not nn.Linear:
        return type(first).joined(layers) if isinstance(first, JoiningLinear) else None  # type: ignore[arg-type]
    plain = [layer for layer in layers if isinstance(layer, nn.Linear)]
    biases = [layer.bias.data for layer in plain if layer.bias is not None]
    alike = {(layer.in_features, layer.weight.dtype) for layer in plain}
    if len(biases) not in (0, len(plain)) or len(alike) > 1:
        return None
    made = nn.Linear(first.in_features, sum(p.out_features for p in plain), bias=bool(biases), device="meta")
    made.weight = nn.Parameter(torch.cat([layer.weight.data for layer in plain]), requires_grad=False)
    if biases:
        made.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return made
