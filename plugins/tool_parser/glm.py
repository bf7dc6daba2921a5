"""GLM 4.5 to 5: a name, then keys and values in tags. 4.7 and later leave the line breaks out.

<tool_call>weather⏎<arg_key>city</arg_key>⏎<arg_value>Paris</arg_value>⏎</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from turnout.core.parsers import CallForm, ParameterForm, Tool
from turnout.plugins.tool_parser.source import Reading, Reads, Source
from turnout.plugins.tool_parser.tagged import Tagged

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


@dataclass
class GLM:
    """Keys and values in tags: GLM 4.5, 4.6, 4.7 and 5."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>", KEY, KEY_END, VALUE, VALUE_END)

    def fits(self, template: str) -> bool:
        return KEY in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading(("<tool_call>",), partial(_read, tools))

    def form(self, template: str) -> CallForm:
        if f"\\n{KEY}" in template or f"\n{KEY}" in template:
            parameters = ParameterForm(f"{KEY}{{key}}{KEY_END}\n{VALUE}", f"{VALUE_END}\n", quote="")
            return CallForm("<tool_call>{name}\n", "</tool_call>", between="\n", parameters=parameters)
        parameters = ParameterForm(f"{KEY}{{key}}{KEY_END}{VALUE}", VALUE_END, quote="")
        return CallForm("<tool_call>{name}", "</tool_call>", parameters=parameters)


def _read(tools: Sequence[Tool], source: Source, marker: str) -> Reads[None]:
    name, _ = yield from source.before("\n", KEY, "</tool_call>", most=300)
    source.announce(name.strip())
    call = Tagged(source, name.strip(), tools)
    yield from source.space()
    while not (yield from source.maybe("</tool_call>")):
        yield from source.take(KEY)
        key, _ = yield from source.until(KEY_END, most=300)
        yield from source.space()
        yield from source.take(VALUE)
        yield from call.read(key.strip(), VALUE_END)
        yield from source.space()
    call.close()
