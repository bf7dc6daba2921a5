"""Qwen3-Coder and Qwen 3.5: functions and parameters as tags.

<tool_call>⏎<function=weather>⏎<parameter=city>⏎Paris⏎</parameter>⏎</function>⏎</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from turnout.core.parsers import CallForm, ParameterForm, Tool
from turnout.plugins.tool_parser.source import Reading, Reads, Source
from turnout.plugins.tool_parser.tagged import Tagged

SEED, SEED_END = "<seed:tool_call>", "</seed:tool_call>"  # Seed-OSS's words for the outer tags


@dataclass
class Qwen3Coder:
    """Tags for functions and parameters: Qwen3-Coder, Qwen3-Next-Coder, Qwen 3.5, Nemotron 3, Step 3.5, Seed-OSS."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>", SEED, SEED_END)

    def fits(self, template: str) -> bool:
        return "<function=" in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading(("<tool_call>", SEED, "<function="), partial(_read, tools))

    def form(self, template: str) -> CallForm:
        if SEED in template:
            parameters = ParameterForm("<parameter={key}>", "</parameter>\n", quote="")
            begin, end = f"{SEED}\n<function={{name}}>\n", f"</function>\n{SEED_END}"
            return CallForm(begin, end, between="\n", parameters=parameters)
        parameters = ParameterForm("<parameter={key}>\n", "\n</parameter>\n", quote="")
        begin, end = "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"
        return CallForm(begin, end, between="\n", parameters=parameters)


def _read(tools: Sequence[Tool], source: Source, marker: str) -> Reads[None]:
    if marker != "<function=":
        yield from source.space()
        yield from source.take("<function=")
    name, _ = yield from source.until(">", most=300)
    source.announce(name.strip())
    call = Tagged(source, name.strip(), tools)
    yield from source.space()
    while not (yield from source.maybe("</function>")):
        yield from source.take("<parameter=")
        key, _ = yield from source.until(">", most=300)
        yield from source.maybe("\n")
        yield from call.read(key.strip(), "\n</parameter>", "</parameter>")
        yield from source.space()
    call.close()
    yield from source.close(SEED_END if marker == SEED else "</tool_call>")
