"""No tool calls: what a model writes is content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import Tool


@dataclass
class NoCalls:
    """Answers are passed as the model wrote them; the client reads calls itself."""

    markers: ClassVar[tuple[str, ...]] = ()

    def fits(self, template: str) -> bool:
        return False

    def start(self, tools: Sequence[Tool]) -> Content:
        return Content()

    def form(self, template: str) -> None:
        return None


class Content:
    """A stream without calls."""

    def feed(self, text: str, tokens: Sequence[int] = ()) -> list[str]:
        return [text] if text else []

    def finish(self, cut: bool) -> list[str]:
        return []
