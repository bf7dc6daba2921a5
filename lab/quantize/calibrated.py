"""Methods that fit to text, by GPTQModel. It is imported when such a method is asked for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import tempfile
from pathlib import Path

from turnout.core import ModelError
from turnout.lab.quantize.config import QuantizeConfig

INSTALL = "pip install gptqmodel (it wants a newer torch than ours; an environment of its own is the safe place)"
FEWEST = 8  # samples a fit can mean anything with


def check() -> None:
    """Raises ModelError with the install command where the library is absent."""
    if importlib.util.find_spec("gptqmodel") is None:
        raise ModelError(
            f"method=gptq and method=awq are computed by GPTQModel, which is not installed: {INSTALL}; "
            f"method=rtn, method=int8 and method=fp8 need nothing more"
        )


def texts(config: QuantizeConfig) -> list[str]:
    """The calibration text's paragraphs. Raises ValueError naming the option."""
    if config.calibration is None:
        raise ValueError(
            f"method={config.method} fits the weights to text: write calibration=FILE, a text like what the model will "
            f"read, its samples divided by empty lines; method=rtn needs none"
        )
    try:
        whole = Path(config.calibration).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"calibration={config.calibration} can't be read as text: {error}") from None
    found = [text.strip() for text in whole.split("\n\n") if text.strip()][: config.samples]
    if len(found) < FEWEST:
        raise ValueError(
            f"calibration={config.calibration} has {len(found)} paragraphs, which empty lines divide; {FEWEST} or more "
            f"are needed, a hundred or more are good"
        )
    return found


def quantize(config: QuantizeConfig, source: Path, out: Path, kept: list[str]) -> None:
    """Fit, round and save the model. GPTQModel shows its own progress."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with fewer it refuses to start
    gptqmodel = importlib.import_module("gptqmodel")

    awq = config.method == "awq"
    settings = gptqmodel.QuantizeConfig(
        bits=config.bits or 4,
        group_size=config.group_size or 64,
        sym=bool(config.symmetric) if awq else config.symmetric is not False,
        desc_act=False if awq else bool(config.act_order),
        quant_method=config.method,
        format="gemm" if awq else "gptq" if config.symmetric is not False else "gptq_v2",
        dynamic={rf"-:^{name}$".replace(".", r"\."): {} for name in kept if name != "lm_head"} or None,
        offload_to_disk=False,
        **({} if awq else {"act_group_aware": False}),
    )
    samples, source, out = texts(config), source.absolute(), out.absolute()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):  # it writes logs to where it runs
        model = gptqmodel.GPTQModel.load(str(source), settings)
        model.quantize(samples, batch_size=1)
        model.save(str(out))
