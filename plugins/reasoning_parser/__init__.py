"""Parsers of reasoning."""

from turnout.core import Register, hookimpl
from turnout.core.parsers import ReasoningParser
from turnout.plugins.reasoning_parser.harmony import Harmony
from turnout.plugins.reasoning_parser.none import NoReasoning
from turnout.plugins.reasoning_parser.tagged import (
    DeepSeekR1,
    GemmaThought,
    GraniteThought,
    MistralThink,
    SeedThink,
    Think,
)


@hookimpl
def register_reasoning_parsers(register: Register[ReasoningParser]) -> None:
    register("think", Think)
    register("deepseek_r1", DeepSeekR1)
    register("mistral", MistralThink)
    register("seed", SeedThink)
    register("granite", GraniteThought)
    register("gemma", GemmaThought)
    register("harmony", Harmony)
    register("none", NoReasoning)
