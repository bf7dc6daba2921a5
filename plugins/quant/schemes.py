"""What a compressed-tensors configuration says of each layer. It reads settings only, never a tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnout.core import ModelError
from turnout.plugins.quant.names import listed


@dataclass(frozen=True)
class Scheme:
    """One of `config_groups`: how the layers that its targets name are stored."""

    label: str  # its key in config_groups
    format: str  # "pack-quantized", "int-quantized", "float-quantized", ...
    weights: Mapping[str, Any]  # num_bits, type, symmetric, strategy, group_size, ...
    inputs: Mapping[str, Any] | None  # of the activations; None: they stay floats
    targets: tuple[str, ...]

    def covers(self, name: str) -> bool:
        """Whether a target names the layer: "Linear" names all, other names go by `names.listed`."""
        return "Linear" in self.targets or listed(name, self.targets) is not None

    def __str__(self) -> str:
        kind = f"{self.weights.get('num_bits')}-bit {self.weights.get('type', 'int')}"
        return f"quantization_config.config_groups.{self.label} ({self.format}, {kind} weights)"


def read(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """The schemes of a quantization_config. Raises ModelError naming the setting."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"quantization_config.config_groups must map names to schemes, got {groups!r}")
    if settings.get("quantization_status", "compressed") != "compressed":
        raise ModelError(
            f"quantization_config.quantization_status is {settings['quantization_status']}, so the weights are not "
            f"stored quantized; save the model compressed (llm-compressor: save_compressed=True)"
        )
    for key in ("sparsity_config", "transform_config"):
        if found := settings.get(key):
            if isinstance(found, Mapping) and found.get("format", found.get("config_groups")) in ("dense", {}, None):
                continue
            raise ModelError(
                f"quantization_config.{key} is set, and quant=compressed-tensors reads dense, plain weights"
            )
    return tuple(_scheme(label, group, str(settings.get("format", ""))) for label, group in groups.items())


def _scheme(label: str, group: Any, default: str) -> Scheme:
    where = f"quantization_config.config_groups.{label}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ModelError(f"{where} must have weights, a table of settings")
    targets, inputs = group.get("targets", ["Linear"]), group.get("input_activations")
    if not isinstance(targets, Sequence) or isinstance(targets, str):
        raise ModelError(f"{where}.targets must be a list of names, got {targets!r}")
    if group.get("output_activations"):
        raise ModelError(f"{where}.output_activations is set, and quant=compressed-tensors quantizes inputs only")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ModelError(f"{where}.input_activations must be a table of settings or null, got {inputs!r}")
    for target in targets:
        try:
            re.compile(str(target).removeprefix("re:"))
        except re.error as error:
            raise ModelError(f"{where}.targets has a pattern that is none, {target!r}: {error}") from None
    return Scheme(label, str(group.get("format") or default), group["weights"], inputs, tuple(map(str, targets)))
