"""A transformers model, served as it is: flat tokens in, logits of the wanted rows out, attention as an argument.

It knows no architecture by name. The model without weights comes from `skeleton`, what its layers need of attention
from a trial run (`probe`), its weights through `loader`. What can't be served correctly is refused, naming the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnout.core import ModelError, ModelInfo, Quantizer
from turnout.core.model import Attend, Format, TensorSource
from turnout.core.optional import NativeProduct, PackedQuantizer
from turnout.kernels import cpu as native
from turnout.kernels.cpu.linear import FLOATS, NativeLinear
from turnout.plugins.loader import fuse, native_layer, native_ops, probe, skeleton, weights
from turnout.plugins.loader.dtypes import pick_device, pick_dtype, short
from turnout.plugins.loader.shards import Shards
from turnout.plugins.loader.source import packed_source

PRODUCTS = {  # `native.bfloat16_products`
    "widen": "float32 units, widened on the way",
    "dot": "AVX512-BF16",
    "tiles": "AMX tiles",
}
SLOW_INTEGERS = (
    "int8: the kernels have no instructions for 8-bit integers on this kind of processor and compute in plain C++, slower "
    "than floats; quant=none is faster where the memory allows"
)
ATTENTION = "turnout"  # the name of our attention function within transformers


@dataclass(frozen=True)
class Info(ModelInfo):
    """What is known of a transformers model before its weights load."""

    model_type: str = ""
    dtype_reason: str = ""
    passes_keywords: bool = True  # its layers hand extra arguments down to attention


class Model:
    """The model with its weights."""

    def __init__(self, info: Info, net: Any, notes: tuple[str, ...] = ()) -> None:
        self.info, self._net, self.notes = info, net, notes
        self._bound = _Bound()
        if not info.passes_keywords:
            for module in net.modules():
                if hasattr(module, "layer_idx"):
                    module.turnout_bound = self._bound

    def __call__(self, tokens: Tensor, positions: Tensor | None, logit_rows: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: int64 [T]; logit_rows: int64 [S]; returns logits [S, vocab]."""
        self._bound.attend = attend
        out = self._net(
            input_ids=tokens[None],
            position_ids=None if positions is None else positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            **{probe.ATTEND: attend},
        )
        return out.logits[0]


class _Bound:
    """Carries the attention function to layers that drop extra arguments."""

    attend: Attend


def inspect(path: str, dtype: str = "auto", device: str = "auto") -> Info:
    """Raises ModelError for a model that can't be served, naming the reason. Reads config.json and file headers."""
    with skeleton.heard() as warnings:
        config, text = skeleton.read_config(path)
    shards = Shards(Path(path))
    where = pick_device(device)
    stored = getattr(text, "dtype", None) or getattr(config, "dtype", None) or shards.dtype()
    quantization = skeleton.quantization(config, text)
    kind, reason = pick_dtype(dtype, stored, where, quantization is not None)
    max_len, notes = skeleton.max_len(text)
    calls: list[probe.Call] = []
    probe.register_trial(calls)
    net = skeleton.build(config, torch.float32, probe.TRIAL, torch.device("meta"), experts="batched_mm")
    found = probe.try_out(net, calls, max_len)
    return Info(
        path=path,
        architecture=type(net).__name__,
        model_type=config.model_type,
        layers=found.layers,
        max_len=max_len,
        vocab_size=found.vocab_size,
        dtype=kind,
        dtype_reason=reason,
        device=where,
        num_parameters=sum(parameter.numel() for parameter in net.parameters()),
        quantization=quantization,
        passes_keywords=found.passes_keywords,
        notes=(reason, *notes, *(f"config.json: {warning}" for warning in warnings)),
    )


def load(
    info: Info,
    quantizer: Quantizer,
    formats: Mapping[str, Format] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Raises ModelError when checkpoint, model and quantizer do not fit. `progress`: (bytes read, bytes in all)."""
    method = None if info.quantization is None else str(info.quantization.get("quant_method", "unknown"))
    if method is not None and method not in quantizer.checkpoint_formats:
        able = ", ".join(sorted(quantizer.checkpoint_formats)) or "unquantized checkpoints only"
        raise ModelError(
            f"{info.path} is quantized as {method!r}, and {type(quantizer).__name__} reads {able}; "
            f"choose a quantizer that reads it, or an unquantized copy of the model"
        )
    from accelerate import init_empty_weights
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    config, _ = skeleton.read_config(info.path)
    experts = "eager" if info.dtype == torch.float64 else None  # the grouped products know no float64
    net = skeleton.build(config, info.dtype, ATTENTION, init_empty_weights(include_buffers=False), experts)
    stored: TensorSource = Shards(Path(info.path))
    if packed := isinstance(quantizer, PackedQuantizer):
        stored = packed_source(info, quantizer, formats or {}, stored, weights.replaceable(net))
    quantized = packed or method is not None
    weights.fill(net, stored, quantizer, info.dtype, info.device, quantized, progress or (lambda done, total: None))
    fuse.fuse(net)
    model = Model(info, net, notes=_exchange(info, net))
    _check_rows(model)
    return model


def _exchange(info: Info, net: Any) -> tuple[str, ...]:
    """Exchange what native kernels compute faster, in place; says what was, and why the rest was not."""
    if info.device.type != "cpu":
        return ()
    kernels = native.obstacle()
    if info.traced or info.dtype not in FLOATS or kernels:
        why = "the model is traced" if info.traced else kernels or f"they compute no {short(info.dtype)}"
        return (f"native layers: none, {why}",)
    native_ops.exchange(net)
    for module in net.modules():
        if isinstance(module, NativeProduct):
            module.native_product()  # lays the weights out for their kernel: now, not in a step
    said = "native layers: none, the model's layers drop the arguments that name their attention"
    if info.passes_keywords:
        said = native_layer.exchange_layers(net, info.dtype)
    if info.dtype == torch.bfloat16:
        said += f"; bfloat16 products by {PRODUCTS[native.bfloat16_products()]}"
    integers = any(isinstance(m, NativeLinear) and m.function == "turnout_int8" for m in net.modules())
    slow = integers and native.integer_products() == native.PLAIN
    return (said, SLOW_INTEGERS) if slow else (said,)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. No mask comes with it: none is registered under our name."""
    attend: Attend = options.get(probe.ATTEND) or module.turnout_bound.attend
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(module.layer_idx, q, k, v, options.get("s_aux"))[None], None


class _Seen(Exception):
    """Enough layers have run."""


@torch.inference_mode()
def _check_rows(model: Model) -> None:
    """Raise ModelError unless a row depends on its own request alone, and positions count from 0.

    The same three tokens run twice, once as the start of a batch at the model's own positions, once behind another
    request at positions we give. Keys and queries of the first two layers, with attention left out, must agree.
    """
    num = min(3, model.info.max_len // 2)
    ids = torch.arange(10, 10 + 3 * num, device=model.info.device) % model.info.vocab_size
    seen: list[list[Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        seen[-1] += [q, k]
        if layer == 1:
            raise _Seen
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    given = torch.arange(num, device=ids.device)
    start, other = ids[: 2 * num], torch.cat([ids[2 * num :], ids[:num]])
    for tokens, positions in ((start, None), (other, torch.cat([given + num, given]))):
        seen.append([])
        with contextlib.suppress(_Seen):
            model(tokens, positions, given[:1], attend)
    for alone, behind in zip(seen[0], seen[1], strict=True):
        expected, got = alone[:num].float(), behind[num:].float()
        if (expected - got).abs().max() > 0.05 * expected.abs().max():
            raise ModelError(
                f"{model.info.architecture} can't be served: a request's result depends on its neighbours, "
                f"or positions do not count from 0"
            )
