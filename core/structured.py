"""The contract of what compiles and enforces the form of an answer. It knows no library, no request and no text.

StructuredSpec ── compile, on a thread ──▶ Grammar ── start, per request ──▶ GrammarState ── fill ──▶ a row of bits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from turnout.core.types import Constraint, StructuredSpec

__all__ = ["Constraint", "Grammar", "GrammarState", "Structured", "StructuredSpec"]


class GrammarState(Protocol):
    """Where one answer stands in its grammar. Used by one thread at a time."""

    @property
    def accepting(self) -> bool:
        """The answer may end here."""

    @property
    def finished(self) -> bool:
        """The answer must end here: no token may follow."""

    def advance(self, tokens: Sequence[int]) -> int:
        """Take tokens in, one after the other, up to the first that may not follow; how many it took. An end token never
        may."""

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens taken in."""

    def copy(self) -> GrammarState:
        """One that goes on from here by itself."""

    def fill(self, row: Tensor) -> None:
        """Write which tokens may follow: bit t % 32 of `row[t // 32]`; `row` is int32 [ceil(vocab_size / 32)], on the
        host. End tokens never may: the caller adds those of its request where `accepting`."""


class Grammar(Protocol):
    """A compiled form, shared by all answers that must have it."""

    def start(self) -> GrammarState:
        """The beginning of an answer. Cheap: called once per request."""


class Structured(Protocol):
    """Compiles forms for one tokenizer."""

    def prepare(self, path: str, vocab_size: int) -> None:
        """Called once, before weights load: the folder with the tokenizer, and the model's number of token ids. Raises
        ModelError for a tokenizer it can't serve."""

    def compile(self, spec: StructuredSpec) -> Grammar:
        """Called on threads, several at once. Raises ValueError for what is not valid, or what it would not enforce to
        the letter, naming the path in the schema."""
