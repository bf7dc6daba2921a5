"""MiniMax M2: functions and parameters as XML; M1: JSON objects, one a line. From MiniMax's templates and guides.

<minimax:tool_call>⏎<invoke name="weather">⏎<parameter name="city">Paris</parameter>⏎</invoke>⏎</minimax:tool_call>
<tool_calls>⏎{"name": "weather", "arguments": {"city": "Paris"}}⏎</tool_calls>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from turnout.core.parsers import CallForm, ParameterForm, Tool
from turnout.plugins.tool_parser.source import Reading, Reads, Source, json_call
from turnout.plugins.tool_parser.tagged import Tagged

XML, XML_END, LINES, LINES_END = "<minimax:tool_call>", "</minimax:tool_call>", "<tool_calls>", "</tool_calls>"


@dataclass
class MiniMax:
    """MiniMax M2 and M1."""

    markers: ClassVar[tuple[str, ...]] = (XML, XML_END, LINES, LINES_END)

    def fits(self, template: str) -> bool:
        return "minimax:tool_call" in template or LINES in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading((XML, LINES), partial(_read, tools))

    def form(self, template: str) -> CallForm:
        if LINES in template:
            begin = '{"name": "{name}", "arguments": '
            return CallForm(begin, "}\n", before=f"{LINES}\n", after=LINES_END)
        parameters = ParameterForm('<parameter name="{key}">', "</parameter>\n", quote="")
        begin, end = '<invoke name="{name}">\n', "</invoke>\n"
        return CallForm(begin, end, before=f"{XML}\n", after=XML_END, parameters=parameters)


def _read(tools: Sequence[Tool], source: Source, marker: str) -> Reads[None]:
    yield from source.space()
    while True:
        if marker == LINES:
            yield from json_call(source)
        else:
            yield from _invoke(tools, source)
        if (yield from source.close(LINES_END if marker == LINES else XML_END)):
            return
        source.begin(source.raw)


def _invoke(tools: Sequence[Tool], source: Source) -> Reads[None]:
    yield from source.take('<invoke name="')
    name, _ = yield from source.until('">', most=300)
    source.announce(name.strip())
    call = Tagged(source, name.strip(), tools)
    yield from source.space()
    while not (yield from source.maybe("</invoke>")):
        yield from source.take('<parameter name="')
        key, _ = yield from source.until('">', most=300)
        yield from call.read(key.strip(), "</parameter>")
        yield from source.space()
    call.close()
