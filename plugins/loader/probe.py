"""What a model's attention needs, learnt from a trial run of transformers' own code on tensors without data.

The trial run happens on the meta device, so it costs no memory and no weights. Each layer's call of the attention
function tells its head counts, sizes, scale, softcap and sinks; the mask function it was given tells its window. A
model that doesn't behave like a decoder whose tokens meet in causal attention alone, once a layer, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turnout.core import LayerSpec, ModelError
from turnout.plugins.loader import private
from turnout.plugins.loader.skeleton import NO_INTERFACE

TRIAL = "turnout_trial"  # the name of the recording attention function within transformers
ATTEND = "turnout_attend"  # the keyword that carries the attention function to the layers
NUM_TOKENS = 3
HARMLESS = {"dropout", "position_ids", "use_cache", "scaling", "sliding_window", "softcap", "s_aux", ATTEND}
KINDS = {"full_attention", "sliding_attention"}  # of layers


class Found(NamedTuple):
    """What the trial run showed."""

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    passes_keywords: bool  # the attention function reaches the layers as an argument


class _Mask(NamedTuple):
    """What a layer gets in place of a mask: the function the mask would be made with."""

    sees: Callable[[int, int, Tensor, Tensor], Tensor]  # (batch, head, query, keys) -> which keys it sees


class Call(NamedTuple):
    """One call of the attention function."""

    layer: int | None
    q: Tensor  # [1, heads, T, head_dim], like k and v
    k: Tensor
    v: Tensor
    mask: Any
    options: dict[str, Any]


def register_trial(calls: list[Call]) -> None:
    """Teach transformers an attention function that writes down its calls and computes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        calls.append(Call(getattr(module, "layer_idx", None), query, key, value, attention_mask, options))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(TRIAL, attention)
    AttentionMaskInterface.register(TRIAL, lambda *_, mask_function, **__: _Mask(mask_function))


def try_out(net: Any, calls: list[Call], max_len: int) -> Found:
    """Run `net`, built on meta with the attention named TRIAL. Raises ModelError naming why it can't be served."""
    name = type(net).__name__
    config = net.config.get_text_config()
    if reason := _disqualified(net, config):
        raise ModelError(f"{name} can't be served: {reason}")
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            # a 2D mask keeps transformers from looking into the positions for packed sequences: they hold no data
            out = net(
                input_ids=tokens,
                position_ids=tokens,
                attention_mask=tokens + 1,
                use_cache=False,
                logits_to_keep=tokens[0, :2],
                **{ATTEND: len},
            )
        vocab_size = out.logits.shape[-1]
        if out.logits.shape[:2] != (1, 2):
            raise ModelError(f"asked for logits of 2 rows, it gave {list(out.logits.shape)}")
        layers = _layers(calls, config.num_hidden_layers, max_len)
    except Exception as error:  # noqa: BLE001  foreign code may fail in any way; it is not served then
        known = isinstance(error, ModelError)
        raise ModelError(f"{name} can't be served: {'' if known else 'a trial run failed: '}{error}") from None
    found = Found(layers, vocab_size, all(call.options.get(ATTEND) is len for call in calls))
    calls.clear()  # transformers keeps the function that writes there
    return found


def _disqualified(net: Any, config: Any) -> str | None:
    """Why the model can't be served, seen without running it."""
    parameters = inspect.signature(net.forward).parameters
    if kinds := set(getattr(config, "layer_types", None) or ()) - KINDS:
        return f"it has layers of kind {', '.join(sorted(kinds))}; known are full and sliding-window attention"
    if not private.takes_attention(net):
        return NO_INTERFACE
    if private.keeps_state(net) or any(isinstance(module, nn.Conv1d) for module in net.modules()):
        return "tokens meet outside attention (a state-space or convolution layer), and that state is not cached"
    for name in ("position_ids", "logits_to_keep"):
        if name not in parameters:
            return f"its forward does not take {name}"
    return None


def _layers(calls: list[Call], num_layers: int, max_len: int) -> tuple[LayerSpec, ...]:
    if not calls:
        raise ModelError(NO_INTERFACE)
    seen = [call.layer for call in calls]
    if sorted(seen, key=str) != sorted(range(num_layers), key=str):
        raise ModelError(f"of its {num_layers} layers, those that call attention are {seen}; each must, once")
    windows: dict[int, int | None] = {}  # by id of the mask: layers share a few
    specs = {}
    for call in calls:
        if not isinstance(call.mask, _Mask):
            raise ModelError(f"layer {call.layer} builds an attention mask of its own")
        if id(call.mask) not in windows:
            windows[id(call.mask)] = _window(call.mask, max_len)
        specs[call.layer] = _spec(call, windows[id(call.mask)], max_len)
    return tuple(specs[layer] for layer in range(num_layers))


def _spec(call: Call, window: int | None, max_len: int) -> LayerSpec:
    """Raises ModelError for anything the attention contract has no word for."""
    where, options = f"layer {call.layer}", call.options
    strange = [
        key for key, value in options.items() if key not in HARMLESS and value is not None and value is not False
    ]
    if strange and not (strange == ["is_causal"] and options["is_causal"] is True):
        raise ModelError(f"{where} gives attention {', '.join(strange)}, which attention backends know nothing of")
    (_, num_heads, num_queries, head_dim), (_, num_kv_heads, num_keys, key_dim) = call.q.shape, call.k.shape
    v_head_dim = call.v.shape[3]
    if num_queries != NUM_TOKENS or num_keys != NUM_TOKENS or key_dim != head_dim or num_heads % num_kv_heads:
        raise ModelError(f"{where} attends with queries {list(call.q.shape)} and keys {list(call.k.shape)}")
    stated = options.get("sliding_window")
    if stated is not None and (stated if stated < max_len else None) != window:
        raise ModelError(f"{where} states a window of {stated}, but its mask has one of {window}")
    scaling = options.get("scaling")
    return LayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        window=window,
        softcap=options.get("softcap") or None,
        sinks=options.get("s_aux") is not None,
        v_head_dim=None if v_head_dim == head_dim else v_head_dim,
    )


def _window(mask: _Mask, num_keys: int) -> int | None:
    """The width of a sliding-window mask, None of a causal one. The last query of all shows it, others confirm it."""

    def sees(query: int) -> Tensor:
        return mask.sees(0, 0, torch.tensor(query), keys).expand(num_keys)

    keys = torch.arange(num_keys)
    try:
        window = int(sees(num_keys - 1).sum())
        queries = {0, window // 2, window - 1, min(window, num_keys - 1), num_keys // 2, num_keys - 1}
        plain = all(torch.equal(sees(query), (keys <= query) & (keys > query - window)) for query in queries)
    except RuntimeError:  # the mask is made of tensors of the batch, which hold no data here
        plain = False
    if not plain:
        raise ModelError("its attention mask is neither causal nor a causal sliding window")
    return None if window == num_keys else window
