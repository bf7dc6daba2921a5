"""`[weather(city="Paris"), tides(days=3)]`: Llama 4 and Llama 3.2's zero-shot calls, from Meta's prompt formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import CallForm, ParameterForm, Tool
from turnout.plugins.tool_parser.python_call import expression, keywords
from turnout.plugins.tool_parser.source import Broken, Reading, Reads, Source, json_calls, names_of

START, END = "<|python_start|>", "<|python_end|>"


@dataclass
class Llama4:
    """A Python list of calls, where the answer begins with it or behind `<|python_start|>`. Also the JSON that Llama 4
    writes there. Calls of functions the request has not are text."""

    markers: ClassVar[tuple[str, ...]] = (START, END)

    def fits(self, template: str) -> bool:
        return "<|header_start|>" in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        known = names_of(tools)

        def read(source: Source, marker: str) -> Reads[None]:
            yield from source.space()
            if (yield from source.peek()) == "{":
                yield from json_calls(source, known=known)
            else:
                yield from _list(source, known)
            yield from source.close(END)

        return Reading((START,), read, opening="[{")

    def form(self, template: str) -> CallForm:
        parameters = ParameterForm("{key}=", between=", ")
        return CallForm("{name}(", ")", before="[", between=", ", after="]", parameters=parameters)


def _list(source: Source, known: frozenset[str]) -> Reads[None]:
    yield from source.take("[")
    while True:
        source.begin(source.raw)
        name, arguments = keywords((yield from expression(source)))
        if name not in known:
            raise Broken
        source.call(name, arguments)
        yield from source.space()
        if not (yield from source.maybe(",")):
            yield from source.maybe("]")
            return
        yield from source.space()
