"""Which tensors of a checkpoint are weights of linear layers: asked of transformers' model, built without weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from turnout.core import ModelError


def found(folder: Path, stored: Collection[str], skip: Sequence[str]) -> tuple[list[str], list[str]]:
    """The layers to quantize, and those to leave in floats, by name. Raises ModelError for a model that can't be, and
    ValueError for a name in `skip` that no layer has."""
    from accelerate import init_empty_weights
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} can't be quantized: {error}") from None
    if getattr(config.get_text_config(), "quantization_config", getattr(config, "quantization_config", None)):
        raise ModelError(f"{folder} is quantized already; quantize the model it was made of")
    with init_empty_weights():
        net = AutoModelForCausalLM.from_config(config)
    linears = [name for name, module in net.named_modules() if type(module) is nn.Linear]
    tied = {name.rpartition(".")[0] for name in getattr(net, "all_tied_weights_keys", {})}
    for wanted in skip:
        if wanted != "lm_head" and not any(_listed(name, [wanted]) for name in linears):
            raise ValueError(f"skip: no linear layer is named {wanted}; there are {', '.join(linears[:8])}, ...")
    kept = [name for name in linears if _listed(name, skip) or name in tied]
    taken = [name for name in linears if name not in kept]
    if lacking := [name for name in taken if f"{name}.weight" not in stored]:
        raise ModelError(
            f"{folder} stores {lacking[0]} and {len(lacking) - 1} others under older names; load the model with transformers "
            f"and save it again first"
        )
    if not taken:
        raise ModelError(f"{folder} has no linear layer to quantize")
    return taken, kept


def _listed(name: str, patterns: Sequence[str]) -> bool:
    return any(name == pattern or name.endswith(f".{pattern}") for pattern in patterns)
