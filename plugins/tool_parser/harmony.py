"""gpt-oss: calls are messages of the commentary channel to a function, from OpenAI's Harmony format guide.

    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

Read from the tokens' text by our own hand: the openai-harmony package fetches its vocabulary from the network when it is
first used, and a server without one must start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import CallForm, Tool
from turnout.plugins.tool_parser.source import Other, Reading, Reads, Source

MESSAGE, ENDS = "<|message|>", ("<|call|>", "<|end|>", "<|return|>")
_TO = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


@dataclass
class Harmony:
    """gpt-oss. Messages that are no calls are left to `reasoning_parser=harmony`."""

    markers: ClassVar[tuple[str, ...]] = ("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, *ENDS)

    def fits(self, template: str) -> bool:
        return "<|channel|>" in template and MESSAGE in template

    def start(self, tools: Sequence[Tool]) -> Reading:
        return Reading(("<|start|>", "<|channel|>"), _read)

    def form(self, template: str) -> CallForm:
        begin = f"<|channel|>commentary to=functions.{{name}} <|constrain|>json{MESSAGE}"
        return CallForm(begin, "", most=1, follows="<|start|>assistant")


def _read(source: Source, marker: str) -> Reads[None]:
    header, _ = yield from source.before(MESSAGE, most=300)
    to = _TO.search(header)
    if to is None:
        raise Other
    yield from source.take(MESSAGE)
    source.announce(to.group(1))
    yield from source.space()
    yield from source.json_object()
    source.done()
    yield from source.space()
    for end in ENDS:
        if (yield from source.maybe(end)):
            return
