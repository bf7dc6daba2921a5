"""A Turnout plugin: `scheduler=sjf`, `attention=counted`, `quant=nf4`, `experiment=bursty`. Importing it imports nothing heavy."""

from typing import Any

from turnout.core import AttentionBackend, Quantizer, Register, RegisterPresets, Scheduler, hookimpl
from turnout_example.counted import Counted
from turnout_example.nf4 import NF4
from turnout_example.sjf import SJF


@hookimpl
def register_schedulers(register: Register[Scheduler]) -> None:
    register("sjf", SJF)


@hookimpl
def register_attention(register: Register[AttentionBackend[Any, Any]]) -> None:
    register("counted", Counted)


@hookimpl
def register_quantizers(register: Register[Quantizer]) -> None:
    register("nf4", NF4)


@hookimpl
def register_presets(register: RegisterPresets) -> None:
    register("turnout_example.conf")
