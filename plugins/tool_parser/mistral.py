"""`[TOOL_CALLS]` of Mistral's templates: up to tokenizer v7 a JSON list, from v11 on a name and its arguments.

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}]
[TOOL_CALLS]weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Paris"}[TOOL_CALLS]tides[ARGS]{}
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import CallForm, Tool
from turnout.plugins.tool_parser.source import Reading, Reads, Source, json_calls


@dataclass
class Mistral:
    """`[TOOL_CALLS]` as Mistral, Ministral, Magistral and Devstral write it, in both generations."""

    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def fits(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading(("[TOOL_CALLS]",), _read)

    def form(self, template: str) -> CallForm:
        if "[ARGS]" in template:
            return CallForm("[TOOL_CALLS]{name}[ARGS]", "")
        return CallForm('{"name": "{name}", "arguments": ', "}", before="[TOOL_CALLS] [", between=", ", after="]")


def _read(source: Source, marker: str) -> Reads[None]:
    yield from source.space()
    if (yield from source.peek()) in "[{":
        yield from json_calls(source, make_id=_id)
        return
    name, found = yield from source.before("[ARGS]", "[CALL_ID]", "{", most=300)
    id = ""
    if found == "[CALL_ID]":
        yield from source.take(found)
        id, found = yield from source.before("[ARGS]", "{", most=300)
    source.announce(name.strip(), id.strip() or _id())
    yield from source.maybe("[ARGS]")
    yield from source.space()
    yield from source.json_object()
    source.done()


def _id() -> str:
    """Nine letters and digits: the templates take no other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
