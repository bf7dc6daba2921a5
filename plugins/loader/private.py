"""Every name of transformers that it does not document as public, and what it is used for: here and nowhere else.

A release may rename any of them; `tests/plugins/loader/test_private.py` then names the release and the name, and
`pyproject.toml` bounds the releases that were tried. (The GGUF format, which may not import this package, imports what
is listed under `transformers.integrations` itself.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

NAMES = {  # module: what is taken from it, and for what
    "transformers.models.auto.modeling_auto": {"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "which model class serves a type"},
    "transformers.modeling_rope_utils": {"ROPE_INIT_FUNCTIONS": "which rotary embeddings are known"},
    "transformers.pytorch_utils": {"Conv1D": "layers stored as [in, out]"},
    "transformers.conversion_mapping": {"get_model_conversion_mapping": "how older names of tensors translate"},
    "transformers.core_model_loading": {
        "WeightConverter": "tensors that are made of several stored ones",
        "WeightRenaming": "tensors stored under another name",
        "dot_natural_key": "the order converters rely on",
        "rename_source_key": "the name and converter of a stored tensor",
    },
    "transformers.integrations.gguf": {
        "convert_gguf_tokenizer": "the tokenizer in a .gguf file",
        "get_gguf_tokenizer": "its kind",
    },
    "transformers.integrations.gguf.gguf_tokenizer_mapping": {"GGUF_PRE_TOKENIZER_SPLITS": "how it splits text"},
}
MEMBERS = {  # of a model's class
    "_get_dtype_plan": "which tensors stay in float32",
    "_adjust_missing_and_unexpected_keys": "which tensors a checkpoint may lack or hold besides",
    "_can_set_attn_implementation": "whether attention goes through the interface that ours is registered with",
    "_is_stateful": "whether tokens meet outside attention",
}
CONVERTER = {  # members of WeightConverter
    "collected_tensors": "the stored tensors it was given",
    "add_tensor": "gives it one",
    "convert": "makes the model's tensors of them",
}


class Renamed(NamedTuple):
    """Where a stored tensor goes."""

    target: str
    pattern: str | None  # of the converter that makes it of several; None: it is stored as it is
    converter: Any


class Conversions:
    """transformers' knowledge of how a checkpoint's names become a model's."""

    def __init__(self, net: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(net)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: made for made in self._converters for pattern in made.source_patterns}
        self._prefix = net.base_model_prefix

    def rename(self, name: str, wanted: Iterable[str]) -> Renamed:
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, wanted)
        return Renamed(target, pattern, self._by_pattern.get(pattern))


def in_order(names: Iterable[str]) -> list[str]:
    """The order in which converters want their tensors."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def kept_in_float32(net: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Patterns of the names of tensors that do not take the model's type, and what they take."""
    found: dict[str, torch.dtype] = net._get_dtype_plan(dtype)
    return found


def really_wrong(net: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Of tensors that are missing and unexpected, those that transformers does not say may be."""
    keys = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    net._adjust_missing_and_unexpected_keys(keys)
    return keys.missing_keys, keys.unexpected_keys


def takes_attention(net: Any) -> bool:
    return bool(net._can_set_attn_implementation())


def keeps_state(net: Any) -> bool:
    """Tokens meet in something that is no attention."""
    return bool(net._is_stateful)


def causal_models() -> dict[str, str]:
    """model_type -> the name of its causal language model's class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return found


def rotary_kinds() -> Sequence[str]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ["default", *ROPE_INIT_FUNCTIONS]


def turned_layers() -> type:
    """The class of linear layers whose weights are [in, out] (GPT-2's)."""
    from transformers.pytorch_utils import Conv1D

    found: type = Conv1D
    return found
