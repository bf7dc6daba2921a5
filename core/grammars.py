"""The forms of answers on their way: compiled on threads, kept, followed token by token. It knows no library and no text.

    add ─▶ ask ─▶ compiling, on a thread ─▶ ready ─▶ constrain(step) ─▶ Constraint: fill before sampling, take after it
             └── known already ──────────────▲

A state is touched by whoever computes steps, one after the other. What its request has is the truth: a state that is
ahead goes back, and one that is behind catches up.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from turnout.core.structured import Grammar, GrammarState, Structured
from turnout.core.types import Chunk, ContractError, GrammarStats, Limits, Request, Result, StructuredSpec

THREADS = 2
KEPT = 256  # compiled forms
PAUSE = 0.005  # seconds that a step with nothing to compute waits for a form


@dataclass(slots=True)
class Followed:
    """A state, and how many tokens of its answer it has taken in."""

    state: GrammarState
    num_taken: int = 0
    ended: bool = False  # the answer is over; a step behind may sample for it once more, for nobody

    def follow(self, request: Request, num_done: int) -> None:
        """Bring the state to where the request has `num_done` tokens of its answer."""
        self.back_to(num_done)
        if self.num_taken < num_done:
            first = request.num_prompt - request.num_begun
            self.take(request.tokens[first + self.num_taken : first + num_done])

    def back_to(self, num_tokens: int) -> None:
        """Have no more than so many tokens taken in."""
        if self.num_taken > num_tokens:
            self.state.rollback(self.num_taken - num_tokens)
            self.num_taken = num_tokens

    def take(self, tokens: Sequence[int]) -> None:
        """Raises ValueError for a token that may not follow."""
        took = self.state.advance(tokens)
        self.num_taken += took
        if took < len(tokens):
            raise ValueError(f"token {tokens[took]} may not follow, by the form that was asked for")


def _num_common(one: Request, other: Request) -> int:
    """With how many tokens both answers begin alike."""
    answers = [request.tokens[request.num_prompt - request.num_begun :] for request in (one, other)]
    return next((i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b), min(map(len, answers)))


class Row(NamedTuple):
    """One row of logits whose token must fit."""

    place: int  # among the step's samples
    request: Request
    followed: Followed
    num_done: int  # tokens of the answer before this one


def _bit(token: int) -> int:
    """The token's bit in its word, as int32 has it."""
    return 1 << token % 32 if token % 32 < 31 else -(1 << 31)


class StepConstraint:
    """A Constraint."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, stats: GrammarStats) -> None:
        self._rows, self._width, self._stats = rows, -(-vocab_size // 32), stats
        self.rows = tuple(row.place for row in rows)  # the samples that are constrained, ascending
        self.taken = not rows
        self.complete: set[int] = set()  # samples after which nothing may follow
        self.errors: dict[int, str] = {}  # samples whose state could not follow, and why

    def fill(self) -> Tensor:
        """See Constraint. Stop tokens wait for `min_tokens`, unless nothing else may follow."""
        began, bits = time.perf_counter(), torch.empty(len(self._rows), self._width, dtype=torch.int32)
        for row, place in zip(self._rows, bits, strict=True):
            if row.followed.ended:
                place.fill_(-1)
                continue
            try:
                row.followed.follow(row.request, row.num_done)
                row.followed.state.fill(place)
                self._write_ends(row, place)
            except Exception as error:  # noqa: BLE001  a stranger's code: this request ends, the others do not
                self.errors[row.place] = f"its form could not be followed: {type(error).__name__}: {error}"
                place.fill_(-1)
        self._stats.masks += len(self._rows)
        self._stats.mask_seconds += time.perf_counter() - began
        return bits

    @staticmethod
    def _write_ends(row: Row, place: Tensor) -> None:
        sampling, state = row.request.sampling, row.followed.state
        bits = [(end // 32, _bit(end)) for end in sampling.stop_ids]
        if not bits:
            return
        plain = place.clone()
        if state.accepting:
            for word, bit in bits:
                plain[word] |= bit
        if row.num_done - row.request.num_begun < sampling.min_tokens:
            for word, bit in bits:
                place[word] &= ~bit
            if place.any():
                return  # else only an end may follow: the form counts for more than min_tokens
        place.copy_(plain)

    def take(self, tokens: Sequence[int], failed: Collection[int] = ()) -> None:
        self.taken = True
        for row in self._rows:
            token = tokens[row.place]
            if row.followed.ended or row.place in failed or row.place in self.errors:
                continue
            if token in row.request.sampling.stop_ids:
                row.followed.ended = True
                continue
            try:
                row.followed.take((token,))
                if row.followed.state.finished:
                    row.followed.ended = True
                    self.complete.add(row.place)
            except Exception as error:  # noqa: BLE001  as above
                self.errors[row.place] = f"its form could not be followed: {type(error).__name__}: {error}"
        self._stats.failed += len(self.errors)

    def judged(self, result: Result) -> Result:
        """The result with the errors found here. Raises ContractError for a runner that did not ask."""
        if not self.taken:
            raise ContractError("the runner sampled without regard to the step's constraint: it must fill and take")
        if not self.errors:
            return result
        return result._replace(errors={**self.errors, **result.errors})


@dataclass
class Grammars:
    """All forms of an engine."""

    structured: Structured | None
    limits: Limits
    vocab_size: int
    stats: GrammarStats
    clock: Callable[[], float]
    _known: OrderedDict[StructuredSpec, Future[Grammar]] = field(default_factory=OrderedDict)
    _compiling: dict[str, tuple[Future[Grammar], float]] = field(default_factory=dict)  # by request; since when
    _followed: dict[str, Followed] = field(default_factory=dict)  # by request
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS, "turnout-grammar"))

    def ask(self, request: Request, parent: Request | None = None) -> bool:
        """Whether the request's form is compiled already, or it has none; else it is in `settled` later. `parent`: whose
        answer it goes on with. Raises ValueError for a form that is refused."""
        spec = request.sampling.structured
        if spec is None:
            return True
        try:
            return self._ask(request, spec, parent)
        except ValueError:
            self.stats.refused += 1
            raise

    def _ask(self, request: Request, spec: StructuredSpec, parent: Request | None) -> bool:
        if self.structured is None:
            raise ValueError("this engine enforces no form of an answer: it was built without structured output")
        if len(spec.value) > self.limits.max_grammar_size:
            raise ValueError(
                f"the form has {len(spec.value)} characters, limits.max_grammar_size is {self.limits.max_grammar_size}"
            )
        alike = parent is not None and parent.sampling.structured == spec
        if parent is not None and alike and (held := self._followed.get(parent.id)) is not None:
            copied = self._followed[request.id] = Followed(held.state.copy(), held.num_taken)
            copied.back_to(_num_common(parent, request))
            return True
        future = self._known.get(spec)
        if future is None:
            future = self._known[spec] = self._pool.submit(self._compile, spec)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(spec)
            self.stats.reused += 1
        if future.done():
            self._followed[request.id] = self._start(future)
            return True
        self._compiling[request.id] = future, self.clock()
        return False

    def settled(self) -> Iterator[tuple[str, str | None]]:
        """Requests whose form is compiled, and those whose form is refused with why, each once."""
        now = self.clock()
        for rid, (future, since) in list(self._compiling.items()):
            if future.done() or now - since > self.limits.grammar_timeout:
                del self._compiling[rid]
                try:
                    self._followed[rid] = self._start(future)
                    yield rid, None
                except ValueError as error:
                    self.stats.refused += 1
                    yield rid, str(error)

    def wait(self) -> None:
        """Let time pass until a form is compiled, but not long."""
        futures = [future for future, _ in self._compiling.values()]
        concurrent.futures.wait(futures, PAUSE, concurrent.futures.FIRST_COMPLETED)

    def constrain(self, chunks: Sequence[Chunk]) -> StepConstraint | None:
        """What the samples of a step must fit; None: nothing."""
        if not self._followed:
            return None
        rows, index = [], 0
        for chunk in chunks:
            if chunk.samples:
                request = chunk.request
                if (held := self._followed.get(request.id)) is not None:
                    rows.append(Row(index, request, held, chunk.end - request.num_prompt + request.num_begun))
                index += 1
        return StepConstraint(rows, self.vocab_size, self.stats) if rows else None

    def drop(self, request_id: str) -> None:
        """Forget a request. Harmless when it is not known."""
        self._followed.pop(request_id, None)
        self._compiling.pop(request_id, None)

    def _start(self, future: Future[Grammar]) -> Followed:
        """A state of a form. Raises ValueError for one that is refused, or not compiled yet: in time, that is."""
        if not future.done():
            seconds = f"{self.limits.grammar_timeout:g} s"
            raise ValueError(
                f"compiling the form took longer than limits.grammar_timeout, {seconds}; send a simpler one"
            )
        try:
            return Followed(future.result().start())
        except ValueError:
            raise
        except Exception as error:  # whatever a stranger's code raises
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _compile(self, spec: StructuredSpec) -> Grammar:
        assert self.structured is not None
        began = time.perf_counter()
        try:
            grammar = self.structured.compile(spec)
            state, row = grammar.start(), torch.zeros(-(-self.vocab_size // 32), dtype=torch.int32)
            state.fill(row)
            if not row.any():
                raise ValueError(f"{'only the empty answer' if state.accepting else 'no answer'} has this form")
            self.stats.compiled += 1
            return grammar
        finally:
            self.stats.compile_seconds += time.perf_counter() - began
