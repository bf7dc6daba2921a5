"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import CallForm, Tool
from turnout.plugins.tool_parser.source import Reading, Reads, Source, json_calls

OTHERS = ("<function=", "<arg_key>", "<minimax:tool_call>")  # formats that share the tag


@dataclass
class Hermes:
    """JSON in `<tool_call>` tags: Hermes, Qwen 2.5 and 3, Granite 4, SmolLM, and most models tuned by others."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def fits(self, template: str) -> bool:
        return "<tool_call>" in template and not any(other in template for other in OTHERS)

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading(("<tool_call>",), _read)

    def form(self, template: str) -> CallForm:
        return CallForm('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n")


def _read(source: Source, marker: str) -> Reads[None]:
    yield from source.space()
    yield from json_calls(source)
    yield from source.close("</tool_call>")
