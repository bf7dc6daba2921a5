"""Kimi K2: calls in a section of special tokens, with ids that count them.

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import CallForm, Tool
from turnout.plugins.tool_parser.source import Reading, Reads, Source

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
DECLARED = "tool_declare<|im_middle|>"  # K2's first template gives the tools so and shows no call
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@dataclass
class Kimi:
    """Kimi K2 and K2 Thinking. A call's id is the model's own, `functions.NAME:PLACE`, as its template wants it back."""

    markers: ClassVar[tuple[str, ...]] = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)

    def fits(self, template: str) -> bool:
        return SECTION in template or DECLARED in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading((SECTION, CALL), _read)

    def form(self, template: str) -> CallForm:
        begin = f"{CALL}functions.{{name}}:{{index}}{ARGUMENTS}"
        return CallForm(begin, CALL_END, before=SECTION, after=SECTION_END)


def _read(source: Source, marker: str) -> Reads[None]:
    if marker == SECTION:
        yield from source.space()
        yield from source.take(CALL)
    while True:
        written, _ = yield from source.until(ARGUMENTS, most=300)
        id = written.strip()
        source.announce(id.removeprefix("functions.").rpartition(":")[0] or id, id)
        yield from source.space()
        yield from source.json_object()
        source.done()
        yield from source.close(CALL_END)
        yield from source.space()
        if not (yield from source.maybe(CALL)):
            yield from source.close(SECTION_END)
            return
        source.begin(source.raw)
