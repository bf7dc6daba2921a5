"""FunctionGemma and Gemma 4: a name and braces, with strings between tokens of their own, from Google's documentation.

<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>
<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turnout.core.parsers import CallForm, ParameterForm, Tool
from turnout.plugins.tool_parser.source import Broken, Reading, Reads, Source

DIALECTS = {  # begin -> end, quote
    "<start_function_call>": ("<end_function_call>", "<escape>"),
    "<|tool_call>": ("<tool_call|>", '<|"|>'),
}
DEPTH = 64  # of values in values


@dataclass
class Gemma:
    """Function calls of FunctionGemma and Gemma 4. A call is sent when it is whole."""

    markers: ClassVar[tuple[str, ...]] = tuple(
        token for begin, (end, quote) in DIALECTS.items() for token in (begin, end, quote)
    )

    def fits(self, template: str) -> bool:
        return any(begin in template for begin in DIALECTS)

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading(tuple(DIALECTS), _read)

    def form(self, template: str) -> CallForm:
        begin = next((begin for begin in DIALECTS if begin in template), next(iter(DIALECTS)))
        end, quote = DIALECTS[begin]
        parameters = ParameterForm("{key}:", between=",", quote=quote)
        return CallForm(f"{begin}call:{{name}}{{", f"}}{end}", parameters=parameters)


def _read(source: Source, marker: str) -> Reads[None]:
    end, quote = DIALECTS[marker]
    yield from source.space()
    yield from source.take("call:")
    name, _ = yield from source.before("{", most=300)
    found = yield from _object(source, quote, 0)
    source.call(name.strip(), json.dumps(found, ensure_ascii=False))
    yield from source.close(end)


def _object(source: Source, quote: str, depth: int) -> Reads[dict[str, Any]]:
    found: dict[str, Any] = {}
    yield from source.take("{")
    yield from source.space()
    while not (yield from source.maybe("}")):
        if found:
            yield from source.take(",")
            yield from source.space()
        key, _ = yield from source.until(":", most=300)
        key = key.strip().removeprefix(quote).removesuffix(quote)
        if not key or key in found:
            raise Broken
        found[key] = yield from _value(source, quote, depth + 1)
        yield from source.space()
    return found


def _value(source: Source, quote: str, depth: int) -> Reads[Any]:
    if depth > DEPTH:
        raise Broken
    yield from source.space()
    if (yield from source.maybe(quote)):
        text, _ = yield from source.until(quote)
        return text
    if (yield from source.maybe("None")):  # Gemma 4's template prints null as Python does
        return None
    first = yield from source.peek()
    if first == "{":
        return (yield from _object(source, quote, depth))
    if first == "[":
        return (yield from _array(source, quote, depth))
    return (yield from source.value())


def _array(source: Source, quote: str, depth: int) -> Reads[list[Any]]:
    items: list[Any] = []
    yield from source.take("[")
    yield from source.space()
    while not (yield from source.maybe("]")):
        if items:
            yield from source.take(",")
        items.append((yield from _value(source, quote, depth + 1)))
        yield from source.space()
    return items
