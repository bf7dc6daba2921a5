"""`<|tool_call|>[{"name": …, "arguments": {…}}]` of IBM's Granite 3 templates. Granite 4 writes as Hermes does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import CallForm, Tool
from turnout.plugins.tool_parser.source import Reading, Reads, Source, json_calls

BEGIN = "<|tool_call|>"


@dataclass
class Granite:
    """Granite 3: a JSON list behind `<|tool_call|>`."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN,)

    def fits(self, template: str) -> bool:
        return "<|start_of_role|>" in template and "<tool_call>" not in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading((BEGIN, "<tool_call>"), _read)

    def form(self, template: str) -> CallForm:
        return CallForm('{"name": "{name}", "arguments": ', "}", before=f"{BEGIN}[", between=", ", after="]")


def _read(source: Source, marker: str) -> Reads[None]:
    yield from source.space()
    yield from json_calls(source)
    yield from source.close("</tool_call>")
