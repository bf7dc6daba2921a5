"""Checkpoints of GPTQ (Frantar et al., arXiv 2210.17323) as AutoGPTQ and GPTQModel write them.

qweight int32 [in * bits / 32, out]: codes end to end down a column; qzeros int32 [groups, out * bits / 32];
scales [groups, out]; g_idx int32 [in], the group of each input; perhaps bias [out].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from turnout.core import ModelError, ModelInfo
from turnout.plugins.quant.stored import (
    Layers,
    Packed,
    check_group,
    check_kernel,
    in_sequence,
    log,
    tensors_of,
    unwords,
    whole_number,
)

BITS = (2, 3, 4, 8)
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # one in each field of a word
FORMATS = ("gptq", "gptq_v2")


@dataclass
class Gptq:
    """GPTQ checkpoints: 2, 3, 4 and 8 bits, with or without act-order.

    `zeros`: "minus_one" reads zero points as the format gptq stores them, "plain" as gptq_v2 does. "auto" goes by the
    checkpoint's label, except where the checkpoint is symmetric and the stored value itself shows which it is.
    """

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset({"gptq"})

    kernel: str = "auto"  # auto, torch, native or triton
    activations: str = "float"  # "int8": a kernel may round a layer's inputs to 8 bits where that is faster
    zeros: str = "auto"  # auto, minus_one or plain

    def __post_init__(self) -> None:
        check_kernel(self.kernel, self.activations)
        if self.zeros not in ("auto", "minus_one", "plain"):
            raise ValueError(f"quant.zeros must be auto, minus_one or plain, got {self.zeros}")
        self._layers = Layers(self.kernel)
        self._settings: Mapping[str, Any] = {}
        self._warned = False

    def prepare(self, settings: Mapping[str, Any] | None, info: ModelInfo) -> None:
        """Check what config.json says of the format."""
        if settings is None:
            raise ModelError(
                "quant=gptq reads checkpoints that are quantized already, and this one holds floats; make one with "
                "`turnout quantize method=gptq`, or choose quant=int8"
            )
        self._layers, self._settings, self._warned = Layers.of(self.kernel, self.activations, info), settings, False
        label = settings.get("checkpoint_format", settings.get("format"))
        if label is not None and label not in FORMATS or settings.get("is_marlin_format"):
            raise ModelError(
                f"quantization_config.checkpoint_format is {'marlin' if label in FORMATS else label}, and quant=gptq "
                f"reads {' and '.join(FORMATS)}; save the model in one of those (GPTQModel: format=...)"
            )
        if (kind := settings.get("pack_dtype", "int32")) != "int32":
            raise ModelError(f"quantization_config.pack_dtype is {kind}, and quant=gptq reads int32")
        dynamic = settings.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise ModelError(f"quantization_config.dynamic must map patterns to settings, got {dynamic!r}")
        for pattern, changed in {"": settings, **dynamic}.items():
            try:
                re.compile(_pattern(pattern))
            except re.error as error:
                raise ModelError(
                    f"quantization_config.dynamic has a pattern that is none, {pattern!r}: {error}"
                ) from None
            if not pattern.startswith("-:"):
                _check({**settings, **changed})

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A `Grouped` layer, or a plain one where the checkpoint holds a plain weight."""
        if "qweight" not in tensors:
            tensors_of(name, tensors, ("weight",))
            return self._layers.plain(tensors)
        if "weight" in tensors:
            raise ModelError(f"{name} is stored twice, as weight and as qweight; drop one of them")
        qweight, qzeros, scales = tensors_of(name, tensors, ("qweight", "qzeros", "scales"))
        settings = self._of(name)
        bits, group = settings["bits"], settings["group_size"]
        index = tensors.get("g_idx")
        num_inputs = qweight.shape[0] * 32 // bits if index is None else len(index)
        self._check_shapes(name, qweight, qzeros, scales, num_inputs, settings)
        if index is None:
            if settings.get("desc_act"):
                raise ModelError(f"{name} lacks g_idx, which quantization_config.desc_act=true needs")
            index = in_sequence(num_inputs, num_inputs if group == -1 else group, qweight.device)
        return self._layers.grouped(
            name,
            Packed(
                codes=unwords(qweight, bits, num_inputs).T,
                scales=scales.T,
                zeros=self._zero_points(name, qzeros, scales.shape[1], settings).T,
                bits=bits,
                index=index.long(),
                bias=tensors.get("bias"),
            ),
        )

    def kernels(self) -> str:
        return self._layers.kernels()

    def _of(self, name: str) -> dict[str, Any]:
        """The settings of one layer: the first pattern of `dynamic` that matches its name changes them."""
        settings = dict(self._settings)
        for pattern, changed in (settings.get("dynamic") or {}).items():
            if re.match(_pattern(pattern), name):
                settings.update(changed)
                break
        bits, group = _check(settings)
        return settings | {"bits": bits, "group_size": group}

    def _check_shapes(
        self, name: str, qweight: Tensor, qzeros: Tensor, scales: Tensor, num_inputs: int, settings: Mapping[str, Any]
    ) -> None:
        bits, group = settings["bits"], settings["group_size"]
        num_groups, num_outputs = scales.shape
        wanted = 1 if group == -1 else -(-num_inputs // group)
        words, zero_words = -(-num_inputs * bits // 32), -(-num_outputs * bits // 32)
        found = (tuple(qweight.shape), tuple(qzeros.shape), num_groups)
        if found != ((words, num_outputs), (wanted, zero_words), wanted):
            raise ModelError(
                f"{name}: with bits={bits} and group_size={group} its {num_inputs} inputs and {num_outputs} outputs make "
                f"{[words, num_outputs]} of qweight, {[wanted, zero_words]} of qzeros and {wanted} rows of scales, but "
                f"{list(found[0])}, {list(found[1])} and {num_groups} are stored; quantization_config is not this "
                f"checkpoint's"
            )

    def _zero_points(self, name: str, qzeros: Tensor, num_outputs: int, settings: Mapping[str, Any]) -> Tensor:
        """uint8 [groups, out], plain."""
        bits = settings["bits"]
        stored = unwords(qzeros.T, bits, num_outputs).T
        if self._is_plain(name, stored, settings):
            return stored
        writers = str((settings.get("meta") or {}).get("quantizer", "")).lower()
        if "gptqmodel" in writers and bits in ONES:
            # it subtracts from whole words, so a zero point of 0 borrowed from its neighbour: give it back
            restored = (qzeros.long() + ONES[bits]) & 0xFFFFFFFF
            return unwords(restored.T, bits, num_outputs).T
        return (stored + 1) & ((1 << bits) - 1)  # a zero point of 0 was stored as the largest code

    def _is_plain(self, name: str, stored: Tensor, settings: Mapping[str, Any]) -> bool:
        if self.zeros != "auto":
            return self.zeros == "plain"
        label = settings.get("checkpoint_format", settings.get("format"))
        plain, middle = label == "gptq_v2", 1 << (settings["bits"] - 1)
        if not settings.get("sym", True):
            return plain
        shown = next((value == middle for value in (middle - 1, middle) if bool((stored == value).all())), plain)
        if shown != plain and label is not None and not self._warned:
            self._warned = True
            log.warning(
                "%s is labelled %s, but its zero points are stored as %s does; read so (quant.zeros overrules)",
                name,
                label,
                "gptq_v2" if shown else "gptq",
            )
        return shown


def _pattern(pattern: str) -> str:
    """GPTQModel's patterns may begin with "+:" (as without) or "-:" (such layers are not quantized)."""
    return pattern[2:] if pattern.startswith(("+:", "-:")) else pattern


def _check(settings: Mapping[str, Any]) -> tuple[int, int]:
    bits = whole_number(settings, ("bits", "w_bit"))
    if bits not in BITS:
        raise ModelError(f"quantization_config.bits is {bits}, and quant=gptq reads {', '.join(map(str, BITS))}")
    group = whole_number(settings, ("group_size", "q_group_size"), -1)
    check_group(group)
    return bits, group
