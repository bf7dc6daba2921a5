"""Where one answer stands, over either library's matcher. It knows no schema.

reasoning … </think> {"a":1}       `after` is "</think>": until the text holds it every token but an end token may
──── free ─────────┘└matcher┘      follow; what its last token says beyond it is dropped
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from turnout.plugins.structured.vocabulary import Vocabulary


class Matcher(Protocol):
    """A library's own state, as far as it is needed here."""

    def take(self, token: int) -> bool:
        """Whether the token may follow; it is taken in then. Never an end token."""
        ...

    def back(self, num_tokens: int) -> None:
        """Forget the last tokens taken in."""
        ...

    def fork(self) -> Matcher:
        """One that goes on from here by itself."""
        ...

    def accepting(self) -> bool:
        """The answer may end here."""
        ...

    def fill(self, row: Tensor) -> None:
        """As GrammarState.fill; end tokens may be among those allowed."""
        ...


class State:
    """A GrammarState."""

    def __init__(self, fresh: Matcher, vocabulary: Vocabulary, after: bytes) -> None:
        """`fresh` stays at the beginning."""
        self._fresh, self._vocabulary, self._after = fresh, vocabulary, after
        self._matcher = fresh.fork()
        self._taken: list[int] = []
        self._free = None if after else 0  # tokens before the form began; None: it has not
        self._row: Tensor | None = None  # what may follow, once asked for

    @property
    def accepting(self) -> bool:
        return self._free is not None and self._matcher.accepting()

    @property
    def finished(self) -> bool:
        return self.accepting and not bool(self._allowed().any())

    def advance(self, tokens: Sequence[int]) -> int:
        for place, token in enumerate(tokens):
            if token in self._vocabulary.end_ids or (self._free is not None and not self._matcher.take(token)):
                return place
            self._taken.append(token)
            self._row = None
            self._look()
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        left = len(self._taken) - num_tokens
        assert 0 <= left <= len(self._taken)
        self._row = None
        del self._taken[left:]
        if self._free is not None and left >= self._free:
            self._matcher.back(num_tokens)
        else:
            self._matcher, self._free = self._fresh.fork(), None  # back among the reasoning

    def copy(self) -> State:
        twin = State(self._fresh, self._vocabulary, self._after)
        twin._matcher, twin._taken = self._matcher.fork(), self._taken.copy()
        twin._free, twin._row = self._free, self._row
        return twin

    def fill(self, row: Tensor) -> None:
        row.copy_(self._vocabulary.keep if self._free is None else self._allowed())

    def _allowed(self) -> Tensor:
        if self._row is None:
            row = self._vocabulary.row()
            self._matcher.fill(row)
            self._row = row.bitwise_and_(self._vocabulary.keep)
        return self._row

    def _look(self) -> None:
        """Whether the form begins with the next token."""
        if self._free is not None:
            return
        last = self._vocabulary.bytes_of(self._taken[-1])
        text = last
        for token in reversed(self._taken[:-1]):
            if len(text) >= len(last) + len(self._after) - 1:
                break
            text = self._vocabulary.bytes_of(token) + text
        if self._after in text:
            self._free = len(self._taken)
