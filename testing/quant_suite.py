"""What the rules of quantizers stand on: layers of floats, the bounds, and a model compared with the float one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from unittest import SkipTest

import torch
from torch import Tensor, nn

from turnout.core.interfaces import Quantizer
from turnout.core.model import ModelInfo
from turnout.core.optional import PreparedQuantizer
from turnout.core.types import ModelError
from turnout.testing.quant_model import SHAPE, distance, load, logits_of, prompts

NAME = "model.layers.3.mlp.up_proj"


class QuantizerSuite:
    """`make` builds a quantizer; the `bits` a weight takes set the bounds; `checkpoint` and `original` are folders."""

    make: Callable[[], Quantizer]
    bits: float | None = None
    checkpoint: str | Path | None = None
    original: str | Path | None = None

    @cached_property
    def held_to(self) -> float:
        """The bits that set the bounds: `bits`, or four fifths of what a layer takes, the rest being scales."""
        if self.bits is not None:
            return self.bits
        return min(0.8 * 8 * bytes_of(self.layer(noise(512, 512, seed=1))) / 512**2, 32.0) if self.takes_floats else 4.0

    @property
    def bound(self) -> float:
        """Relative error of a layer's output, for normal weights: 0.05 with 8 bits (fp8 has 0.04), 0.2 with 4."""
        return 0.002 if self.held_to >= 16 else max(0.05, 3.2 / 2**self.held_to)

    @property
    def model_bound(self) -> float:
        """`Distance.share` of the tiny model: 0.03 with 8 bits, 0.2 with 4, 0.8 with 3. Broken ones are beyond 0.45."""
        return 0.001 if self.held_to >= 16 else max(0.03, 50 / 4**self.held_to)

    @property
    def flips_bound(self) -> float:
        """Share of positions of the tiny model, whose best tokens are close, where another token is likeliest."""
        return 0.02 if self.held_to >= 16 else min(0.35 + 5.6 / 2**self.held_to, 0.95)

    def close(self, original: Path, path: Path, what: str) -> None:
        """Raises AssertionError where the model in `path` is too far from the float one."""
        model, info = load(original, None)
        asked = prompts(info.vocab_size)
        truth = logits_of(model, info, asked)
        found = distance(truth, logits_of(*load(path, self.make()), asked))
        said = f"{what}: {found.share:.3f} of all is lost, {found.flips:.0%} flips, {found.perplexity:.3f} x perplexity"
        assert found.share <= self.model_bound, f"{said}; allowed for {self.held_to:.3g} bits {self.model_bound:.3f}"
        assert found.flips <= self.flips_bound, f"{said}; allowed for {self.held_to:.3g} bits {self.flips_bound:.0%}"

    def layer(self, weight: Tensor, bias: Tensor | None = None, name: str = NAME) -> nn.Module:
        """The layer a new quantizer makes of floats."""
        self.needs_floats()
        quantizer = self._prepared(weight.dtype)
        return quantizer.linear(name, {"weight": weight} | ({} if bias is None else {"bias": bias}))

    def needs_floats(self) -> None:
        if not self.takes_floats:
            raise SkipTest("it reads checkpoints only; inherit QuantizerContract and name one")

    @cached_property
    def takes_floats(self) -> bool:
        try:
            self._prepared(torch.float32)
        except ModelError:
            return False
        return True

    def _prepared(self, dtype: torch.dtype) -> Quantizer:
        quantizer = self.make()
        if isinstance(quantizer, PreparedQuantizer):
            size, layers = SHAPE["vocab_size"], ()
            quantizer.prepare(None, ModelInfo("", "", layers, 256, size, dtype, torch.device("cpu"), 0))
        return quantizer


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def run(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out


def error_of(got: Tensor, want: Tensor) -> float:
    """The distance as a share of what it should be."""
    if not want.numel():
        return 0.0
    off = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return float("inf") if math.isnan(off) else off


def bytes_of(layer: nn.Module) -> int:
    """Of every tensor reachable from a layer's attributes, each memory once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[object] = [layer]
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            stack += thing.values()
        elif isinstance(thing, list | tuple):
            stack += thing
        elif hasattr(thing, "__dict__") and not isinstance(thing, type):
            stack += vars(thing).values()
    return sum(found.values())
