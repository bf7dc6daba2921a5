"""The schema of conf/. Composed by Hydra, checked here, turned into objects at once; shipped between processes as data.

A component's node is its dataclass, so `OmegaConf.to_object` builds the object: nothing in YAML names code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from turnout.compose.choices import SLOTS
from turnout.compose.plugins import Plugins, options_of
from turnout.core.types import Limits


@dataclass
class Config:
    """An engine. Commands extend it by what they ask for besides."""

    model: str = "smollm2"  # the demo model, a Hugging Face folder, a .gguf file, or a name on the hub
    dtype: str = (
        "auto"  # of weights and activations: auto is what suits checkpoint and device; float32, bfloat16, float16
    )
    device: str = "auto"  # auto: a GPU where there is one; cpu, cuda, cuda:1
    kv_cache_dtype: str = "auto"  # or an 8-bit form the attention backend keeps: fp8, int8
    loader: Any = MISSING
    attention: Any = MISSING
    scheduler: Any = MISSING
    preemption: Any = MISSING
    blocks: Any = MISSING
    quant: Any = MISSING
    runner: Any = MISSING
    tool_parser: Any = MISSING
    reasoning_parser: Any = MISSING
    structured: Any = MISSING
    limits: Limits = field(default_factory=Limits)


def resolve(composed: DictConfig) -> Config:
    """The composed configuration as objects: each component an instance of its dataclass. Raises what they raise."""
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config


def chosen(config: Config, plugins: Plugins) -> dict[str, str]:
    """The name of the choice in each slot."""
    names = {}
    for slot in SLOTS:
        kind = type(getattr(config, slot))
        names[slot] = next((c.name for c in plugins.choices.values() if c.slot == slot and c.component is kind), "")
        if not names[slot]:
            raise ValueError(f"{slot} is a {kind.__qualname__}, which no plugin offers as a choice")
    return names


def to_container(config: Config, plugins: Plugins) -> dict[str, Any]:
    """The configuration as plain values: `{"attention": {"name": "torch", "options": {...}}, "limits": {...}, ...}`."""
    plain: dict[str, Any] = {}
    for slot, name in chosen(config, plugins).items():
        options = OmegaConf.to_container(OmegaConf.structured(getattr(config, slot)), enum_to_str=True)
        plain[slot] = {"name": name, "options": options}
    for spec in dataclasses.fields(Config):
        if spec.name not in SLOTS:
            value = getattr(config, spec.name)
            plain[spec.name] = options_of(value) if dataclasses.is_dataclass(value) else value
    return plain


def from_container(plain: Mapping[str, Any], plugins: Plugins) -> Config:
    """The inverse of `to_container`, in a process that has loaded the same plugins. What a command asked for besides
    is not in it."""
    values: dict[str, Any] = {"limits": Limits(**plain["limits"])}
    values |= {name: plain[name] for name in ("model", "dtype", "device", "kv_cache_dtype")}
    for slot in SLOTS:
        node = OmegaConf.structured(plugins.get(slot, plain[slot]["name"]).component)
        values[slot] = OmegaConf.to_object(OmegaConf.merge(node, plain[slot]["options"]))
    return Config(**values)
