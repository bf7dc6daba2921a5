"""A model folder's config.json as a transformers model without weights. It knows no engine and reads no tensor.

Rotary embeddings whose frequencies depend on the longest sequence of a batch ("dynamic" and "longrope") would let a
request's neighbours change its result. They keep the frequencies of short sequences, and `max_len` is the length up to
which transformers uses those: within it every result is transformers' own, and longer requests are refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from turnout.core import ModelError
from turnout.plugins.loader import private

NO_INTERFACE = "its attention does not go through transformers' AttentionInterface"


def read_config(path: str) -> tuple[Any, Any]:
    """transformers' configuration and that of its language part."""
    import transformers

    file, version = Path(path) / "config.json", f"transformers {transformers.__version__}"
    if not file.is_file():
        raise ModelError(f"{path} has no config.json; name a Hugging Face model folder")
    try:
        plain = json.loads(file.read_text())
        named = (plain.get("architectures") or [None])[0]
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file} is not JSON as transformers writes it: {error}") from None
    if plain.get("auto_map") and not (named and hasattr(transformers, named)):
        raise ModelError(f"{named} can't be served: it is code of the checkpoint's own (auto_map), which is never run")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        text = config.get_text_config()
    except Exception as error:  # noqa: BLE001  each configuration class checks in its own way
        raise ModelError(f"{version} can't read {file}: {error}") from None
    known = private.causal_models().get(config.model_type)
    if known is None:
        raise ModelError(
            f"{named or config.model_type} can't be served: {version} has no causal language model for "
            f"model_type {config.model_type!r}"
        )
    if named is not None and named != known:
        raise ModelError(
            f"{named} can't be served: the causal language model of model_type {config.model_type!r} is {known}"
        )
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        raise ModelError(f"{named or known} can't be served: it attends to an encoder; only decoders alone can be")
    return config, text


def build(
    config: Any, dtype: torch.dtype, attention: str, context: AbstractContextManager[Any], experts: str | None = None
) -> Any:
    """The model without weights. `context`: on which device its tensors are made."""
    from transformers import AutoModelForCausalLM

    config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
    try:
        with context:
            net = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, experts_implementation=experts
            )
    except Exception as error:  # noqa: BLE001  model classes check their configuration in any way
        if isinstance(error, KeyError) and error.args == (attention,):
            raise ModelError(f"{config.model_type} can't be served: {NO_INTERFACE}") from None
        if (
            isinstance(error, KeyError)
            and error.args
            and error.args[0] in (strange := _strange_rope(config.get_text_config()))
        ):
            raise ModelError(f"{config.model_type} can't be served: {strange[error.args[0]]}") from None
        raise ModelError(f"{config.model_type} can't be built from its config.json: {error}") from None
    for module in net.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {layer: _fixed(kind) for layer, kind in kinds.items()}
        elif isinstance(kinds, str):
            module.rope_type = _fixed(kinds)
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # it reads tokens back from the device
            module.warn_if_padding_and_no_attention_mask = _nothing
    return net.eval()


def _ropes(text: Any) -> list[dict[str, Any]]:
    """The settings of the rotary embedding: one, or one for each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    return list(rope.values()) if all(isinstance(value, dict) for value in rope.values()) else [rope]


def _strange_rope(text: Any) -> dict[str, str]:
    """Kinds of rotary embedding that transformers' own code does not list, each with what to say of it."""
    known = private.rotary_kinds()
    kinds = {str(rope.get("rope_type", "default")) for rope in _ropes(text)} - set(known)
    return {kind: f"config.json states rope_type {kind!r}; known are {', '.join(known)}" for kind in kinds}


@contextmanager
def heard() -> Iterator[list[str]]:
    """What transformers warns of meanwhile, each thing once: settings it does not know, or finds strange."""
    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() not in said:
                said.append(record.getMessage())

    handler, logger = Listening(logging.WARNING), logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def _nothing(*_: Any) -> None:
    """No batch holds padding."""


def _fixed(rope_type: str) -> str:
    """A rotary embedding of this kind recomputes nothing; what it computed when it was built is for short sequences."""
    return "default" if "dynamic" in rope_type or rope_type == "longrope" else rope_type


def max_len(text: Any) -> tuple[int, tuple[str, ...]]:
    """How long a request may get, and the note that says why when it is less than the model's own length."""
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise ModelError(f"config.json states max_position_embeddings={longest}; state how many tokens the model takes")
    ropes = _ropes(text)
    short = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    if not short or min(short) >= longest:
        return longest, ()
    note = (
        f"the context is limited to {min(short)} of {longest} tokens: beyond, the rotary embedding (longrope) of every "
        f"request depends on the longest one beside it"
    )
    return min(short), (note,)


def quantization(config: Any, text: Any) -> dict[str, Any] | None:
    """The checkpoint's quantization_config, wherever it stands; None: there is none."""
    for place in (config, text):
        if settings := getattr(place, "quantization_config", None):
            return settings if isinstance(settings, dict) else settings.to_dict()
    return None
