"""No reasoning: what a model writes is content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass
class NoReasoning:
    """Answers are passed as the model wrote them, reasoning and all."""

    markers: ClassVar[tuple[str, ...]] = ()
    end: ClassVar[str] = ""

    def fits(self, template: str) -> bool:
        return False

    def start(self, prompt: str, prefill: str) -> Content:
        return Content()


class Content:
    """A stream without reasoning."""

    thinking = expected = False

    def feed(self, text: str, tokens: Sequence[int] = ()) -> list[str]:
        return [text] if text else []

    def finish(self) -> list[str]:
        return []
