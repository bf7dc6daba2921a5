"""Whether what was chosen can serve the model, and what `auto` stands for: decided before the weights load."""

from __future__ import annotations

from turnout.core.config import Config, chosen
from turnout.core.interfaces import AUTO_ORDER, Capabilities, ModelInfo
from turnout.core.plugins import Choice, Plugins
from turnout.core.types import ModelError


def choose_attention(config: Config, info: ModelInfo, found: Plugins) -> str:
    """Check the attention backend against the model, or choose one for `auto`; the note that says which and why.

    Raises ModelError with every reason why the asked one can't serve this model, and what would.
    """
    size, kind = config.blocks.block_size, info.device.type

    def refusals(choice: Choice) -> list[str]:
        can: Capabilities = choice.component.capabilities  # type: ignore[attr-defined]
        needs = info.layers, size, info.dtype, info.device, config.kv_cache_dtype, config.runner.replays
        return choice.obstacles() + can.refusals(*needs)

    asked = chosen(config, found)["attention"]
    if asked == "auto":
        passed: list[str] = []
        for name in AUTO_ORDER.get(kind, ("torch",)):
            known = name in found.names("attention")
            reasons = refusals(found.get("attention", name)) if known else ["no installed plugin offers it"]
            if not reasons:
                config.attention = found.get("attention", name).component()
                why = f"not {'; not '.join(passed)}" if passed else f"the best for {kind} that is installed"
                return f"attention=auto chose {name}: {why}"
            passed.append(f"{name}, since {', '.join(reasons)}")
        raise ModelError(f"attention=auto found no backend for {config.model}: not {'; not '.join(passed)}")
    reasons = refusals(found.get("attention", asked))
    if reasons:
        others = [c for c in found.choices.values() if c.slot == "attention" and c.name != "auto"]
        able = [c.name for c in others if not refusals(c)]
        remedy = f"Choices that would work: {', '.join(able)}." if able else "No installed backend would work."
        raise ModelError(f"attention={asked} cannot serve {config.model}: {'; '.join(reasons)}. {remedy}")
    return ""


def choose_quantizer(config: Config, info: ModelInfo, found: Plugins) -> str:
    """Check the quantizer against the checkpoint's format, or choose what reads it for `auto`; the note that says so.

    Raises ModelError naming both when they do not fit.
    """
    asked = chosen(config, found)["quant"]
    method = None if info.quantization is None else str(info.quantization.get("quant_method", "unknown"))
    readers = [
        name
        for name in found.names("quant")
        if method in getattr(found.get("quant", name).component, "checkpoint_formats", ())
    ]
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
