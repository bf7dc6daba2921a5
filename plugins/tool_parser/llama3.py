"""Llama 3.1 to 3.3: an answer that is a JSON call, or what follows `<|python_tag|>`, from Meta's prompt formats.

{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "tides", "parameters": {}}
<|python_tag|>brave_search.call(query="weather in Paris")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import CallForm, Tool
from turnout.plugins.tool_parser.python_call import expression, keywords
from turnout.plugins.tool_parser.source import Broken, Reading, Reads, Source, json_call, names_of

TAG = "<|python_tag|>"


@dataclass
class Llama3:
    """JSON calls of Llama 3.1, 3.2 and 3.3, and built-in tools behind the python tag. An object is a call only where
    the answer begins with it, or behind the tag, and where it names one of the request's functions."""

    markers: ClassVar[tuple[str, ...]] = (TAG,)

    def fits(self, template: str) -> bool:
        return "<|start_header_id|>" in template and '"parameters"' in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        known = names_of(tools)

        def read(source: Source, marker: str) -> Reads[None]:
            yield from source.space()
            if (yield from source.peek()) == "{":
                yield from _objects(source, known)
            else:
                yield from _builtin(source, known)

        return Reading((TAG,), read, opening="{")

    def form(self, template: str) -> CallForm:
        return CallForm('{"name": "{name}", "parameters": ', "}", between="; ")


def _objects(source: Source, known: frozenset[str]) -> Reads[None]:
    while True:
        yield from json_call(source, known=known)
        yield from source.space()
        if not (yield from source.maybe(";")):
            return
        source.begin(source.raw)
        yield from source.space()


def _builtin(source: Source, known: frozenset[str]) -> Reads[None]:
    text = yield from expression(source)
    name, arguments = keywords(text)
    name = name.removesuffix(".call")
    if name not in known:
        raise Broken
    source.call(name, arguments)
