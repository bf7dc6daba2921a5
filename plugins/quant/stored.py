"""From the tensors of a packed checkpoint to `Grouped` layers: what GPTQ, AWQ and compressed-tensors share.

It knows no format by name. A layer is quantized when its packed tensors are stored, and plain when its weight is: lists
of skipped modules are never matched by name.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from turnout.core import ModelError, ModelInfo
from turnout.plugins.quant import grouped
from turnout.plugins.quant.grouped import STORED, Grouped, narrowed, pack
from turnout.plugins.quant.none import Unquantized

log = logging.getLogger("turnout.quant")

ACTIVATIONS = ("float", "int8")
SMALLEST = 8  # inputs a group is cut down to at most, where groups are uneven


@dataclass
class Packed:
    """One layer as a checkpoint describes it: W[o, i] = scales[o, g] * (codes[o, i] - zeros[o, g]), g = index[i]."""

    codes: Tensor  # uint8 [out, in]
    scales: Tensor  # float [out, groups]
    zeros: Tensor  # uint8 [out, groups], or float
    bits: int
    index: Tensor  # int64 [in], the group of each input
    bias: Tensor | None = None


@dataclass
class Layers:
    """Makes the layers of one model, and remembers which kernels they got."""

    kernel: str = "auto"
    dtype: torch.dtype = torch.float32
    activations: str = "float"
    used: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, kernel: str, activations: str, info: ModelInfo) -> Layers:
        """For a model that is about to load. Raises ModelError for a kernel that can't be where the model will run."""
        if info.traced and kernel == "native":
            raise ModelError(
                "quant.kernel=native is not for torch.compile to trace; choose quant.kernel=torch or runner.mode=eager"
            )
        return cls("torch" if info.traced and kernel == "auto" else kernel, info.dtype, activations)

    def plain(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A layer the checkpoint left in floats, in the served dtype."""
        return Unquantized().linear("", {leaf: tensor.to(self.dtype) for leaf, tensor in tensors.items()})

    def grouped(self, name: str, packed: Packed) -> Grouped:
        """Raises ModelError naming the layer: groups that can't be laid end to end, a kernel that can't compute it."""
        num_outputs, num_inputs = packed.codes.shape
        num_groups = packed.scales.shape[1]
        if tuple(packed.zeros.shape) != (num_outputs, num_groups) or packed.scales.shape[0] != num_outputs:
            raise ModelError(
                f"{name}: {list(packed.scales.shape)} scales and {list(packed.zeros.shape)} zero points do not fit "
                f"{num_outputs} outputs in {num_groups} groups; the checkpoint is damaged or of another format"
            )
        if len(packed.index) != num_inputs or not 0 <= int(packed.index.min()) <= int(packed.index.max()) < num_groups:
            raise ModelError(
                f"{name}: its group index (g_idx) has {len(packed.index)} entries from {int(packed.index.min())} to "
                f"{int(packed.index.max())}, but there are {num_inputs} inputs in {num_groups} groups"
            )
        if num_inputs * STORED[packed.bits] % 8:
            raise ModelError(f"{name}: {num_inputs} inputs of {packed.bits} bits do not fill whole bytes")
        order, counts = _order(packed.index, num_groups)
        group = math.gcd(*counts)
        if group < min(SMALLEST, max(counts)):
            raise ModelError(
                f"{name}: its groups have {min(counts)} to {max(counts)} inputs and no common size of {SMALLEST} or "
                f"more; quantize the model again with a group size that divides {num_inputs}, or -1"
            )
        pieces = torch.tensor([count // group for count in counts], device=packed.codes.device)
        scales, zeros = (
            tensor.to(torch.float32).repeat_interleave(pieces, dim=1) for tensor in (packed.scales, packed.zeros)
        )
        codes = packed.codes if order is None else packed.codes[:, order]
        layer = Grouped(
            pack(codes, packed.bits),
            narrowed(scales),
            narrowed(-(scales * zeros)),  # exact in float32: 11 bits of a float16 scale times 8 of a zero point
            packed.bits,
            group,
            None if packed.bias is None else packed.bias.to(self.dtype),
            order,
        )
        return self.chosen(name, layer)

    def chosen(self, name: str, layer: Grouped) -> Grouped:
        """The layer, with the kernel that was asked for or is best. Raises ModelError naming the layer."""
        layer.kernel = self._kernel(name, layer)
        self.used[layer.kernel] += 1
        return layer

    def kernels(self) -> str:
        """Which kernels the layers got, for the fingerprint and the start's report."""
        return ", ".join(f"{name} for {count} layers" for name, count in sorted(self.used.items()))

    def _kernel(self, name: str, layer: Grouped) -> str:
        if self.kernel == "auto":
            return grouped.best(layer, self.dtype)
        if why := grouped.obstacle(self.kernel, layer, self.dtype):
            raise ModelError(
                f"quant.kernel={self.kernel} can't compute {name}: {why}; choose quant.kernel=auto or quant.kernel=torch"
            )
        return self.kernel


def check_kernel(kernel: str, activations: str = "float") -> None:
    """Raises ValueError naming the choices."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"quant.activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")
    known = ("auto", "torch", *grouped.KERNELS)
    if kernel not in known:
        raise ValueError(f"quant.kernel must be one of {', '.join(known)}, got {kernel}")


def tensors_of(name: str, tensors: Mapping[str, Tensor], wanted: tuple[str, ...]) -> list[Tensor]:
    """The tensors of those leaves. Raises ModelError naming the layer and what it lacks."""
    if missing := [leaf for leaf in wanted if leaf not in tensors]:
        raise ModelError(f"{name} is quantized but lacks {', '.join(missing)}; it holds {', '.join(sorted(tensors))}")
    return [tensors[leaf] for leaf in wanted]


def unwords(words: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [count, n] of int32 [num_words, n]: codes lie end to end down a column, the first in the lowest bits.

    A code of 3, 5 or 6 bits may begin in one word and end in the next.
    """
    start = torch.arange(count, device=words.device) * bits
    word, shift = start // 32, (start % 32)[:, None]
    low = (words[word] >> shift) & ((1 << bits) - 1)  # an arithmetic shift: the sign's copies are masked, or replaced
    crossing = (shift[:, 0] + bits > 32).nonzero()[:, 0]
    if len(crossing):
        first = 32 - shift[crossing]  # bits of the code that lie in its first word
        kept = words[word[crossing]] >> shift[crossing] & ((1 << first) - 1)
        low[crossing] = (kept | words[word[crossing] + 1] << first) & ((1 << bits) - 1)
    return low.to(torch.uint8)


def in_sequence(num_inputs: int, group: int, device: torch.device) -> Tensor:
    """The group of each input when groups of one size lie end to end; the last may be short."""
    return torch.arange(num_inputs, device=device) // group


def whole_number(settings: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int:
    """A setting under the first of its spellings. Raises ModelError naming it."""
    for key in keys:
        value = settings.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ModelError(f"quantization_config.{key} must be a whole number, got {value!r}")
            return value
    if default is None:
        raise ModelError(f"quantization_config lacks {keys[0]}; add what the model was quantized with")
    return default


def check_group(group: int, where: str = "quantization_config.group_size") -> None:
    """Raises ModelError unless it is -1, one group for a whole row, or a size."""
    if group != -1 and group < SMALLEST:
        raise ModelError(f"{where} must be -1 (one group a row) or at least {SMALLEST}, got {group}")


def _order(index: Tensor, num_groups: int) -> tuple[Tensor | None, list[int]]:
    """The inputs group by group, None when they lie so already, and how many each group has."""
    counts = [count for count in torch.bincount(index, minlength=num_groups).tolist() if count]
    if len(counts) < num_groups:
        raise ModelError(f"{num_groups - len(counts)} of {num_groups} groups have no input")
    sequential = bool((index[1:] >= index[:-1]).all())
    return (None if sequential else torch.argsort(index, stable=True)), counts
