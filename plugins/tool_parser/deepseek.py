"""DeepSeek V3, R1 and V3.1: calls between special tokens.

V3, R1   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather⏎```json⏎{…}⏎```<｜tool▁call▁end｜>…
V3.1     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import CallForm, Tool
from turnout.plugins.tool_parser.source import Reading, Reads, Source

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@dataclass
class DeepSeek:
    """DeepSeek V3 and R1, with fenced JSON, and V3.1, with bare JSON."""

    markers: ClassVar[tuple[str, ...]] = (CALLS, CALLS_END, CALL, SEP, CALL_END)

    def fits(self, template: str) -> bool:
        return CALL in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading((CALLS, CALL), _read)

    def form(self, template: str) -> CallForm:
        if "```json" in template:
            begin, end = f"{CALL}function{SEP}{{name}}\n```json\n", f"\n```{CALL_END}"
            return CallForm(begin, end, before=CALLS, between="\n", after=CALLS_END)
        return CallForm(f"{CALL}{{name}}{SEP}", CALL_END, before=CALLS, after=CALLS_END)


def _read(source: Source, marker: str) -> Reads[None]:
    if marker == CALLS:
        yield from source.space()
        yield from source.take(CALL)
    while True:
        yield from _call(source)
        yield from source.close(CALL_END)
        yield from source.space()
        if not (yield from source.maybe(CALL)):
            yield from source.close(CALLS_END)
            return
        source.begin(source.raw)


def _call(source: Source) -> Reads[None]:
    kind, _ = yield from source.until(SEP, most=300)
    yield from source.space()
    if (yield from source.peek()) == "{":  # V3.1
        source.announce(kind.strip())
        yield from source.json_object()
        source.done()
        return
    name, _ = yield from source.until("\n", most=300)
    source.announce(name.strip())
    yield from source.space()
    fenced = yield from source.maybe("```json")
    yield from source.space()
    yield from source.json_object()
    source.done()
    if fenced:
        yield from source.close("```")
