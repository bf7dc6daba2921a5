"""Whether what was chosen can serve the model, and what `auto` stands for: decided before the weights load."""

from __future__ import annotations

from collections.abc import Iterable

from turnout.compose.choices import Choice
from turnout.compose.config import Config, chosen
from turnout.compose.plugins import OWN, Plugins
from turnout.core.interfaces import Auto, Capabilities
from turnout.core.model import ModelInfo
from turnout.core.optional import Ranked, RefusingBackend
from turnout.core.types import ModelError


def choose_attention(config: Config, info: ModelInfo, found: Plugins) -> str:
    """Check the attention backend against the model, or choose one for `auto`; the note that says which and why.

    Raises ModelError with every reason why the asked one can't serve this model, and what would.
    """
    size, kind = config.blocks.block_size, info.device.type

    backends = [c for c in found.choices.values() if c.slot == "attention" and c.component is not Auto]

    def refusals(choice: Choice) -> list[str]:
        can, needs = _capabilities(choice), (info.layers, size, info.dtype, info.device, config.kv_cache_dtype)
        reasons = choice.obstacles() + can.refusals(*needs, config.runner.replays)
        own = choice.component.refusals(*needs) if isinstance(choice.component, RefusingBackend) else []
        return reasons + own

    asked = chosen(config, found)["attention"]
    if asked == "auto":
        passed: list[str] = []
        for choice in in_order(backends, kind):
            if not (reasons := refusals(choice)):
                config.attention = choice.component()
                why = f"not {'; not '.join(passed)}" if passed else f"the best for {kind} that is installed"
                return f"attention=auto chose {choice.name}: {why}"
            passed.append(f"{choice.name}, since {', '.join(reasons)}")
        none = "; not ".join(passed) or "a single one, since no installed plugin has a rank there"
        raise ModelError(f"attention=auto found no backend for {config.model} on {kind}: not {none}")
    reasons = refusals(found.get("attention", asked))
    if reasons:
        able = [c.name for c in backends if not refusals(c)]
        remedy = f"Choices that would work: {', '.join(able)}." if able else "No installed backend would work."
        raise ModelError(f"attention={asked} cannot serve {config.model}: {'; '.join(reasons)}. {remedy}")
    return ""


def choose_quantizer(config: Config, info: ModelInfo, found: Plugins) -> str:
    """Check the quantizer against the checkpoint's format, or choose what reads it for `auto`; the note that says so.

    Raises ModelError naming both when they do not fit.
    """
    asked = chosen(config, found)["quant"]
    method = None if info.quantization is None else str(info.quantization.get("quant_method", "unknown"))
    known = [c for c in found.choices.values() if c.slot == "quant" and c.component is not Auto]
    readers = [c.name for c in sorted(known, key=_quantizer_place) if method in _reads(c)]
    if asked == "auto":
        if method is not None and not readers:
            raise ModelError(
                f"{config.model} is quantized as {method!r}, and no installed quantizer reads that; install a plugin "
                f"that does (`turnout plugins` lists what there is), or serve an unquantized copy of the model"
            )
        name = readers[0] if readers else "none"
        config.quant = found.get("quant", name).component()
    else:
        name = asked
        if method is not None and name not in readers:
            able = ", ".join(f"quant={reader}" for reader in readers)
            raise ModelError(
                f"{config.model} is quantized as {method!r}, and quant={name} does not read that; "
                + (
                    f"leave quant unset, or choose {able}"
                    if able
                    else "choose a plugin that does, or an unquantized copy of the model"
                )
            )
    if obstacles := found.get("quant", name).obstacles():
        raise ModelError(f"quant={name} can't be had here: {'; '.join(obstacles)}")
    return f"quant=auto chose {name}: the checkpoint is quantized as {method!r}" if asked == "auto" and method else ""


def choose_structured(config: Config, info: ModelInfo, found: Plugins) -> str:
    """Prepare what enforces the form of an answer, or choose one for `auto`; the note that says which.

    Raises ModelError for one that was asked for and can't be had. `auto` without any that can stands for `none`.
    """
    asked = chosen(config, found)["structured"]
    if asked != "auto":
        if obstacles := found.get("structured", asked).obstacles():
            raise ModelError(f"structured={asked} can't be had here: {'; '.join(obstacles)}")
        config.structured.prepare(info.path, info.vocab_size)
        return ""
    passed: list[str] = []
    known = [c for c in found.choices.values() if c.slot == "structured" and isinstance(c.component, Ranked)]
    for choice in sorted(known, key=_structured_place):
        reasons = choice.obstacles()
        try:
            if not reasons:
                config.structured = choice.component()
                config.structured.prepare(info.path, info.vocab_size)
                why = f"not {'; not '.join(passed)}" if passed else "the best that is installed"
                return f"structured=auto chose {choice.name}: {why}"
        except ModelError as error:
            reasons = [str(error)]
        passed.append(f"{choice.name}, since {'; '.join(reasons)}")
    config.structured = found.get("structured", "none").component()
    return f"structured=auto chose none: not {'; not '.join(passed)}"


def in_order(backends: Iterable[Choice], device: str) -> list[Choice]:
    """The attention backends that take part in attention=auto on a device type, best first."""
    ranks = [(_capabilities(choice).auto_rank, choice) for choice in backends]
    placed = [(rank.get(device, rank.get("any")), choice) for rank, choice in ranks]
    able = [(place, choice) for place, choice in placed if place is not None]
    return [choice for _, choice in sorted(able, key=lambda each: (-each[0], each[1].package != OWN, each[1].name))]


def _capabilities(choice: Choice) -> Capabilities:
    can: Capabilities = choice.component.capabilities  # type: ignore[attr-defined]
    return can


def _reads(choice: Choice) -> frozenset[str]:
    formats: frozenset[str] = choice.component.checkpoint_formats  # type: ignore[attr-defined]
    return formats


def _quantizer_place(choice: Choice) -> tuple[float, bool, str]:
    rank = choice.component.auto_rank if isinstance(choice.component, Ranked) else 0.0
    return -rank, choice.package != OWN, choice.name


def _structured_place(choice: Choice) -> tuple[float, bool, str]:
    rank: float = choice.component.auto_rank  # type: ignore[attr-defined]
    return -rank, choice.package != OWN, choice.name
