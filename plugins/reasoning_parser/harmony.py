"""gpt-oss: messages on channels, from OpenAI's Harmony format guide. The analysis channel is the reasoning.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

What a tool parser reads, a message to a function, is content as it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnout.core.parsers import Thought, overlap

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
HEADS = ("<|start|>", "<|channel|>")


@dataclass
class Harmony:
    """gpt-oss. The final channel and what is said before a call are content."""

    markers: ClassVar[tuple[str, ...]] = ("<|constrain|>", MESSAGE, *ENDS, *HEADS)
    end: ClassVar[str] = "<|channel|>final<|message|>"

    def fits(self, template: str) -> bool:
        return "<|channel|>" in template and MESSAGE in template

    def start(self, prompt: str, prefill: str) -> Channels:
        return Channels(head=prompt if not prefill and prompt.endswith(MESSAGE) else "")


class Channels:
    """The stream of one answer. `head`: the prompt's end, where it holds a message's beginning."""

    def __init__(self, head: str = "") -> None:
        self._text, self._verbatim, self.expected = "", False, True
        self._body = bool(head)  # inside a message
        self.thinking = head.rpartition("<|channel|>")[2].startswith("analysis")

    def feed(self, text: str, tokens: Sequence[int] = ()) -> list[str | Thought]:
        self._text += text
        return self._read(ended=False)

    def finish(self) -> list[str | Thought]:
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> list[str | Thought]:
        given: list[str | Thought] = []
        while self._text:
            before = self._text, self._body
            if self._body:
                self._message(given, ended)
            else:
                self._head(given, ended)
            if before == (self._text, self._body):
                break
        return given

    def _head(self, given: list[str | Thought], ended: bool) -> None:
        """Up to a message's text. Text without a head is content."""
        starts = [self._text.find(head) for head in HEADS if head in self._text]
        begin = min(starts, default=len(self._text) - (0 if ended else overlap(self._text, HEADS)))
        if begin:
            given.append(self._text[:begin])
            self._text = self._text[begin:]
        head, found, rest = self._text.partition(MESSAGE)
        if not found:
            if ended and self._text:
                given.append(self._text)
                self._text = ""
            return
        self._body, self._text = True, rest
        self._verbatim = "to=" in head
        self.thinking = not self._verbatim and head.rpartition("<|channel|>")[2].strip().startswith("analysis")
        if self._verbatim:
            given.append(head + MESSAGE)

    def _message(self, given: list[str | Thought], ended: bool) -> None:
        """Up to a message's end."""
        marks = (*ENDS, *HEADS)
        found = min(((self._text.find(mark), mark) for mark in marks if mark in self._text), default=None)
        place = found[0] if found else len(self._text) - (0 if ended else overlap(self._text, marks))
        text, self._text = self._text[:place], self._text[place:]
        if found is not None and found[1] in ENDS:
            self._text = self._text[len(found[1]) :]
            text += found[1] if self._verbatim else ""
        if text:
            given.append(Thought(text) if self.thinking else text)
        if found is not None:
            self._body = self.thinking = self._verbatim = False
