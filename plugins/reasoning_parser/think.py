"""Reasoning between two texts at the answer's start, as most models write it. The prompt may have opened it."""

from __future__ import annotations

from collections.abc import Sequence

from turnout.core.parsers import Thought, overlap


class Tags:
    """The stream of reasoning between `start` and `end`.

    `thinking`: it has begun already. `expected`: it will come. `ends`: texts that end it as well and belong to the content,
    a tool call for one. White space around the reasoning is the format's.
    """

    def __init__(
        self, start: str, end: str, *, thinking: bool, expected: bool = False, ends: Sequence[str] = ()
    ) -> None:
        self.thinking, self.expected = thinking, thinking or expected
        self._start, self._end, self._ends = start, end, tuple(ends)
        self._text = ""  # not read yet
        self._fresh = True  # nothing of the part that is read was given yet
        self._opens = True  # the reasoning may begin here
        self._opened = thinking

    def feed(self, text: str, tokens: Sequence[int] = ()) -> list[str | Thought]:
        self._text += text
        return self._read(ended=False)

    def finish(self) -> list[str | Thought]:
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> list[str | Thought]:
        given: list[str | Thought] = []
        if self._opens and not self._begin(ended):
            return given
        if self.thinking:
            self._think(given, ended)
        if not self.thinking and self._text:
            text = self._text.lstrip() if self._fresh and self._opened else self._text
            self._text = ""
            if text:
                self._fresh = False
                given.append(text)
        return given

    def _begin(self, ended: bool) -> bool:
        """Find out whether the reasoning begins here. False: that is not known yet."""
        plain = self._text.lstrip()
        if plain.startswith(self._start):
            self._text, self.thinking = plain[len(self._start) :], True
        elif not ended and self._start.startswith(plain):
            return False
        self._opens, self._opened = False, self.thinking
        return True

    def _think(self, given: list[str | Thought], ended: bool) -> None:
        marks = (self._end, *self._ends)
        if self._fresh:
            self._text = self._text.lstrip()
        places = [(self._text.find(mark), mark) for mark in marks]
        found = min(((place, mark) for place, mark in places if place >= 0), default=None)
        if found is not None:
            place, mark = found
            thought, rest = self._text[:place].rstrip(), self._text[place:]
            self._text = rest.removeprefix(mark) if mark == self._end else rest
        elif ended:
            thought, self._text = self._text.rstrip(), ""
        else:
            thought = self._text[: len(self._text) - overlap(self._text, marks)].rstrip()
            self._text = self._text[len(thought) :]
        if thought:
            self._fresh = False
            given.append(Thought(thought))
        if found is not None:
            self.thinking, self._fresh = False, True


def opened(start: str, end: str, prompt: str, prefill: str) -> bool:
    """Whether the prompt has begun the reasoning and not ended it."""
    return prefill.rfind(start) > prefill.rfind(end) if prefill else prompt.rstrip().endswith(start)


def closed(end: str, prompt: str, prefill: str) -> bool:
    """Whether the prompt has ended the reasoning."""
    return end in prefill if prefill else prompt.rstrip().endswith(end)
