"""What a plugin author needs to prove a plugin: oracles, a model that runs anywhere, and the rules of each contract.

`turnout plugins check SLOT=NAME` runs `check_component`; tests may call the pieces themselves.
"""

from turnout.testing.attention import (
    Compared,
    attention_oracle,
    check_attention,
    compare_attention,
    plain_attention,
    run_attention,
)
from turnout.testing.attention_cases import attention_cases
from turnout.testing.attention_contract import AttentionContract
from turnout.testing.attention_scene import AttentionCase
from turnout.testing.blocks import BlockManagerContract
from turnout.testing.checks import Checked, check_component
from turnout.testing.fake import TokenCacheRunner, check_balance, continuation, make_engine, serve_all
from turnout.testing.formats import FormatContract
from turnout.testing.loader import LoaderContract
from turnout.testing.policies import PreemptionContract, SchedulerContract
from turnout.testing.quant import QuantizerContract
from turnout.testing.runner import RunnerContract
from turnout.testing.structured import StructuredContract

__all__ = [
    "AttentionCase",
    "AttentionContract",
    "BlockManagerContract",
    "Checked",
    "Compared",
    "FormatContract",
    "LoaderContract",
    "PreemptionContract",
    "QuantizerContract",
    "RunnerContract",
    "SchedulerContract",
    "StructuredContract",
    "TokenCacheRunner",
    "attention_cases",
    "attention_oracle",
    "check_attention",
    "check_balance",
    "check_component",
    "compare_attention",
    "continuation",
    "make_engine",
    "plain_attention",
    "run_attention",
    "serve_all",
]
