"""`<|tool_call|>[{"name": …, "arguments": {…}}]<|/tool_call|>` of Phi-4-mini, which also writes `functools[…]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import CallForm, Tool
from turnout.plugins.tool_parser.source import Reading, Reads, Source, json_calls

BEGIN, END, WORD = "<|tool_call|>", "<|/tool_call|>", "functools["


@dataclass
class Phi4:
    """Phi-4-mini: a JSON list between its special tokens, or behind the word `functools`."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)

    def fits(self, template: str) -> bool:
        return "<|/tool|>" in template or END in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading((BEGIN, WORD), _read)

    def form(self, template: str) -> CallForm:
        return CallForm('{"name": "{name}", "arguments": ', "}", before=f"{BEGIN}[", between=", ", after=f"]{END}")


def _read(source: Source, marker: str) -> Reads[None]:
    yield from source.space()
    yield from json_calls(source, listed=marker == WORD)
    yield from source.close(END)
