"""Sibling linear layers that read the same input, computed in one product: q/k/v, gate/up.

The model's own code goes on calling each layer. The first one computes all of them and keeps the others' outputs; a
sibling called with that very input takes its own, with any other input it computes alone. So nothing depends on the
order in which a model calls its layers; only the speed does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # like F.linear
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Shared:
    """One product for several layers, and the outputs not yet fetched."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight = torch.cat([layer.weight.data for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
        self.product: Product = F.linear
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, index: int, x: Tensor) -> Tensor | None:
        """What layer `index` makes of `x`; None when it must be computed alone."""
        if index == 0:
            self._input = x
            self._outputs = dict(enumerate(torch.split(self.product(x, self.weight, self.bias), self.sizes, -1)))
        elif self._input is not x:
            return None
        found = self._outputs.pop(index, None)
        if not self._outputs:
            self._input = None  # nothing is kept alive until the next step
        return found


class Part(nn.Linear):
    """One of the layers; its weight is a part of the shared one."""

    def __init__(self, shared: Shared, index: int, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        start = sum(shared.sizes[:index])
        rows = slice(start, start + layer.out_features)
        self.weight = nn.Parameter(shared.weight[rows], requires_grad=False)
        if shared.bias is not None:
            self.bias = nn.Parameter(shared.bias[rows], requires_grad=False)
        self.shared, self._index = shared, index

    def forward(self, x: Tensor) -> Tensor:
        found = self.shared.output(self._index, x)
        return F.linear(x, self.weight, self.bias) if found is None else found


def fuse(net: nn.Module) -> int:
    """Fuse the plain float siblings of `net`, in place; how many groups there were. Other modules stay as they are."""
    groups = 0
    for module in list(net.modules()):
        for names in SIBLINGS:
            layers = [layer for name in names if type(layer := getattr(module, name, None)) is nn.Linear]
            if len(layers) == len(names) and _alike(layers):
                shared = Shared(layers)
                for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
                    setattr(module, name, Part(shared, index, layer))
                groups += 1
    return groups


def _alike(layers: list[nn.Linear]) -> bool:
    first = layers[0]
    return all(
        (layer.bias is None) == (first.bias is None)
        and layer.weight.shape[1] == first.weight.shape[1]
        and layer.weight.dtype == first.weight.dtype
        for layer in layers
    )
