"""Tensors into a model built without weights, one linear layer at a time through the quantizer.

It knows no architecture: where a tensor belongs, how older names translate and which may be ignored is transformers'
own knowledge. Every tensor must find its place and every place its tensor, else ModelError.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from turnout.core import ModelError, Quantizer
from turnout.core.model import TensorSource
from turnout.core.optional import PackedQuantizer, StackCheck
from turnout.plugins.loader import private
from turnout.plugins.loader.shards import some

Read = Callable[[str], Tensor]


def fill(
    net: Any,
    shards: TensorSource,
    quantizer: Quantizer,
    dtype: torch.dtype,
    device: torch.device,
    quantized: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Give every parameter and buffer of `net`, a transformers model whose parameters are on meta, its tensor.

    `quantized`: the checkpoint holds linear layers in the quantizer's format, so whatever lies under such a layer's
    name is the quantizer's to read. Tied tensors share memory; one that is stored twice must be equal both times.
    A layer stored as [in, out] (GPT-2's) is turned for the quantizer.
    `progress` hears of (bytes read, bytes in all).
    """
    places = _Places(net, dtype, device, quantized)
    plan = _plan(places, shards)
    if isinstance(quantizer, StackCheck):
        for name, parameter in net.named_parameters():
            if parameter.dim() > 2:
                quantizer.check_stacked(name, tuple(parameter.shape))
    total, done = sum(shards.tensors[name].num_bytes for name in plan.reads), 0

    def read(name: str) -> Tensor:
        nonlocal done
        done += shards.tensors[name].num_bytes
        tensor = shards.read(name)
        progress(done, total)
        return tensor

    places.expect(plan.targets | plan.ties.keys())
    tied: dict[str, Tensor] = {}
    for target, source in plan.sources.items():
        for made, tensor in _made(net, target, source, read).items():
            tensor = places.fitted(made, tensor)
            if made in plan.tables:
                places.put_table(made, tensor, quantizer, plan.tables[made])
            elif made in plan.ties or made in plan.ties.values():
                tied[made] = tensor
            else:
                places.put(made, tensor, quantizer)
    for target, owner in plan.ties.items():
        if target in tied and not torch.equal(tied[target], tied[owner]):
            raise ModelError(
                f"config.json ties {target} to {owner}, but the checkpoint holds both and they differ; "
                f'set "tie_word_embeddings": false there to serve them as they are stored, or drop one of them'
            )
    for target, owner in (plan.ties | {owner: owner for owner in plan.ties.values()}).items():
        places.put(target, tied[owner], quantizer)
    places.finish()


def replaceable(net: nn.Module) -> frozenset[str]:
    """The linear layers and the plain embeddings: what a quantizer with tensors of its own may replace."""
    return frozenset(name for name, module in net.named_modules() if type(module) in (nn.Linear, nn.Embedding))


class _Places:
    """Where tensors go in the model, and what each must look like."""

    def __init__(self, net: Any, dtype: torch.dtype, device: torch.device, quantized: bool) -> None:
        turned = private.turned_layers()
        self.net = net
        self.wanted: dict[str, Tensor] = net.state_dict()
        self._turned = {name for name, module in net.named_modules() if type(module) is turned}  # weights [in, out]
        self._linears = {name for name, module in net.named_modules() if type(module) is nn.Linear} | self._turned
        self._dtype, self._device, self._quantized = dtype, device, quantized
        self.tables = {name for name, module in net.named_modules() if type(module) is nn.Embedding}
        kept = private.kept_in_float32(net, dtype)
        self._kept = [(re.compile(glob.replace("*", ".*")), own) for glob, own in kept.items()]
        self._leaves: dict[str, set[str]] = defaultdict(set)  # of each linear layer
        self._parts: dict[str, dict[str, Tensor]] = defaultdict(dict)  # of linear layers not yet complete

    def is_free_form(self, target: str) -> bool:
        """A tensor only the quantizer understands."""
        name, _, leaf = target.rpartition(".")
        return self._quantized and (name in self._linears or (name in self.tables and leaf != "weight"))

    def missing(self, found: set[str]) -> set[str]:
        """What the model wants and `found` lacks. A free-form layer wants anything at all."""
        begun = {target.rpartition(".")[0] for target in found if self.is_free_form(target)}
        return {target for target in self.wanted if target not in found and target.rpartition(".")[0] not in begun}

    def expect(self, targets: set[str]) -> None:
        """A linear layer is made once all of its tensors among these are there."""
        for target in targets:
            name, _, leaf = target.rpartition(".")
            self._leaves[name].add(leaf)

    def misfit(self, target: str, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """Why such a tensor can't go there; None: it can."""
        if self.is_free_form(target):
            return None
        wanted = self.wanted[target]
        if shape != tuple(wanted.shape):
            return f"{target} is {list(shape)}, the model wants {list(wanted.shape)}"
        if dtype.is_floating_point != wanted.is_floating_point():
            return f"{target} is stored as {dtype}, the model wants {wanted.dtype}"
        return None

    def fitted(self, target: str, tensor: Tensor) -> Tensor:
        """The tensor in its final type, on the device. What only the quantizer understands stays as it is stored."""
        if reason := self.misfit(target, tuple(tensor.shape), tensor.dtype):
            raise ModelError(f"the checkpoint does not fit the model: {reason}")
        if self.is_free_form(target):
            return tensor.to(self._device)
        wanted = self.wanted.get(target)
        dtype = self._dtype if wanted is None else wanted.dtype
        dtype = next((kept for glob, kept in self._kept if glob.search(target)), dtype)
        return tensor.to(self._device, dtype if tensor.is_floating_point() else tensor.dtype)

    def put_table(self, target: str, tensor: Tensor, quantizer: Quantizer, heads: list[str]) -> None:
        """An embedding of rows that only the quantizer understands, and the heads that are the same tensor."""
        name, _, leaf = target.rpartition(".")
        assert isinstance(quantizer, PackedQuantizer)
        layer = quantizer.linear(name, {leaf: tensor})
        for place in (name, *heads):
            _check_made(place, self.net.get_submodule(place), False, layer)
            self.net.set_submodule(place, layer)
        self.net.set_submodule(name, quantizer.embedding(name, layer))

    def put(self, target: str, tensor: Tensor, quantizer: Quantizer) -> None:
        name, _, leaf = target.rpartition(".")
        if name not in self._linears:
            module = self.net.get_submodule(name)
            is_parameter = leaf in module._parameters
            setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
            return
        parts = self._parts[name]
        parts[leaf] = tensor.t().contiguous() if name in self._turned and leaf == "weight" else tensor
        if parts.keys() == self._leaves[name]:
            parent, _, child = name.rpartition(".")
            made = quantizer.linear(name, self._parts.pop(name))
            _check_made(name, self.net.get_submodule(name), name in self._turned, made)
            setattr(self.net.get_submodule(parent), child, made)

    def finish(self) -> None:
        """Move the buffers no checkpoint holds, and see that nothing was forgotten."""
        for module in self.net.modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[leaf] = buffer.to(self._device)
        empty = [name for name, tensor in self.net.state_dict().items() if getattr(tensor, "is_meta", False)]
        if empty or self._parts:
            raise ModelError(f"the checkpoint does not fill {some({*empty, *self._parts})}")


def _check_made(name: str, wanted: nn.Module, turned: bool, made: nn.Module) -> None:
    """Raise ModelError unless a quantizer's layer has the model's sizes, and a bias where the model has one.

    A bias of zeros where the model has none is dropped: AutoGPTQ stores one for every layer.
    """
    assert isinstance(wanted.weight, Tensor)
    ins, outs = wanted.weight.shape if turned else reversed(wanted.weight.shape)
    sizes = getattr(made, "in_features", ins), getattr(made, "out_features", outs)
    if sizes != (ins, outs):
        raise ModelError(
            f"the checkpoint does not fit the model: {name} maps {sizes[0]} inputs to {sizes[1]} outputs, the model "
            f"wants {ins} to {outs}"
        )
    own: Any = getattr(wanted, "bias", None)
    bias: Any = getattr(made, "bias", own)
    if (bias is None) == (own is None):
        return
    if bias is None:
        raise ModelError(f"the checkpoint does not fit the model: it lacks {name}.bias")
    if bool(bias.any()):
        raise ModelError(
            f"the checkpoint does not fit the model: it holds {name}.bias, and the model has no bias there"
        )
    setattr(made, "bias", None)  # noqa: B010  the type of an unknown module is not known to have one


@dataclass
class _Plan:
    """Which stored tensors make which tensors of the model."""

    sources: dict[str, Any] = field(default_factory=dict)  # target -> a stored name, or transformers' converter
    targets: set[str] = field(default_factory=set)  # all that they make
    ties: dict[str, str] = field(default_factory=dict)  # target -> the target it shares memory with
    tables: dict[str, list[str]] = field(
        default_factory=dict
    )  # tensor of a quantized embedding -> layers that share it
    reads: list[str] = field(default_factory=list)  # stored names
    clashes: list[str] = field(default_factory=list)

    def add(self, name: str, target: str, pattern: str | None, converter: Any) -> None:
        """`name` is `target`, or one of the tensors that `converter` makes it of, by the pattern that matched."""
        self.reads.append(name)
        known = self.sources.get(target)
        if known is not None and (pattern is None or isinstance(known, str)):
            self.clashes.append(f"{name} and {known if isinstance(known, str) else 'others'} both are {target}")
        elif pattern is None:
            self.sources[target] = name
            self.targets.add(target)
        else:
            mine = self.sources.setdefault(target, deepcopy(converter))
            mine.add_tensor(target, name, pattern, name)
            first, *others = mine.target_patterns
            self.targets |= {target, *(target.replace(first, other) for other in others)}


def _plan(places: _Places, shards: TensorSource) -> _Plan:
    """Decided on names and shapes alone, so a checkpoint that does not fit is refused before its tensors are read."""
    net, wanted, plan = places.net, places.wanted, _Plan()
    conversions = private.Conversions(net)
    unexpected: set[str] = set()
    misfits: list[str] = []
    for name in private.in_order(shards.tensors):
        target, pattern, converter = conversions.rename(name, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted and not places.is_free_form(target):
            unexpected.add(name)
            continue
        plan.add(name, target, pattern, converter)
        if pattern is None:
            stored = shards.tensors[name]
            misfits += filter(None, [places.misfit(target, stored.shape, stored.dtype)])
    begun = {target.rpartition(".")[0] for target in plan.targets if places.is_free_form(target)}
    tables = {
        t.rpartition(".")[0]: t for t in plan.targets if t not in wanted and t.rpartition(".")[0] in places.tables
    }
    plan.tables = {target: [] for target in tables.values()}
    for target, owner in net.all_tied_weights_keys.items():
        if target not in plan.targets and target.rpartition(".")[0] in begun:
            continue  # a head stored quantized is a copy of its own
        if owner.rpartition(".")[0] in tables:
            plan.tables[tables[owner.rpartition(".")[0]]].append(target.rpartition(".")[0])
            continue
        if owner not in plan.targets and target in plan.targets:
            owner, target = target, owner
        plan.ties[target] = owner
    _refuse(places, plan, unexpected, plan.clashes + misfits)
    return plan


def _refuse(places: _Places, plan: _Plan, unexpected: set[str], misfits: list[str]) -> None:
    """Raise ModelError with all that does not fit, but for what transformers itself says may be there or be absent."""
    found = plan.targets | {target for target, owner in plan.ties.items() if owner in plan.targets}
    found |= {f"{head}.weight" for heads in plan.tables.values() for head in heads}
    missing, unexpected = private.really_wrong(places.net, places.missing(found), unexpected)
    reasons = []
    if missing:
        untied = missing == {"lm_head.weight"} and not plan.ties
        hint = ' (config.json says "tie_word_embeddings": false, so the head must be stored)' if untied else ""
        reasons.append(f"it lacks {some(missing)}{hint}")
    if unexpected:
        reasons.append(f"the model has no place for {some(unexpected)}")
    reasons += misfits[:5]
    if reasons:
        raise ModelError(f"the checkpoint does not fit {type(places.net).__name__}: {'; '.join(reasons)}")


def _made(net: Any, target: str, source: Any, read: Read) -> dict[str, Tensor]:
    """The model's tensors that `source` makes: one as it is stored, or what transformers' converter makes of several."""
    if isinstance(source, str):
        return {target: read(source)}
    for pattern, names in source.collected_tensors.items():
        source.collected_tensors[pattern] = [partial(read, name) for name in names]
    try:
        made = source.convert(target, model=net, config=net.config)
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001  a converter that meets shapes it was not made for fails in any way
        raise ModelError(f"the tensors that make up {target} can't be put together: {error}") from None
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}
