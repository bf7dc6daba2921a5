"""Both libraries keep the contract of structured output, and the rules find the faults that such components have."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from torch import Tensor

from turnout.core.structured import Grammar, GrammarState, StructuredSpec
from turnout.plugins.structured import LLGuidance, XGrammar
from turnout.testing import StructuredContract, check_component
from turnout.testing.structured_scene import END


class TestLLGuidance(StructuredContract):
    make = LLGuidance


class TestXGrammar(StructuredContract):
    make = XGrammar


class Wrapped:
    """A state that does all right, for a fault to be written over."""

    def __init__(self, state: GrammarState) -> None:
        self.state = state

    @property
    def accepting(self) -> bool:
        return self.state.accepting

    @property
    def finished(self) -> bool:
        return self.state.finished

    def advance(self, tokens: Sequence[int]) -> int:
        return self.state.advance(tokens)

    def rollback(self, num_tokens: int) -> None:
        self.state.rollback(num_tokens)

    def copy(self) -> GrammarState:
        return type(self)(self.state.copy())

    def fill(self, row: Tensor) -> None:
        self.state.fill(row)


class NotAdvanced(Wrapped):
    def advance(self, tokens: Sequence[int]) -> int:
        return self.state.copy().advance(tokens)


class NotRolledBack(Wrapped):
    def rollback(self, num_tokens: int) -> None:
        pass


class OneTooFewRolledBack(Wrapped):
    def rollback(self, num_tokens: int) -> None:
        self.state.rollback(num_tokens - 1)


class SharedCopy(Wrapped):
    def copy(self) -> GrammarState:
        return self


class StaleMask(Wrapped):
    row: Tensor | None = None

    def fill(self, row: Tensor) -> None:
        if self.row is None:
            self.state.fill(row)
            self.row = row.clone()
        row.copy_(self.row)

    def copy(self) -> GrammarState:
        twin = StaleMask(self.state.copy())
        twin.row = self.row
        return twin


class EndsAllowed(Wrapped):
    def fill(self, row: Tensor) -> None:
        self.state.fill(row)
        row[END // 32] |= 1 << END


class EverythingAllowed(Wrapped):
    def fill(self, row: Tensor) -> None:
        row.fill_(-1)


class NeverFinished(Wrapped):
    @property
    def finished(self) -> bool:
        return False


class AlwaysAccepting(Wrapped):
    @property
    def accepting(self) -> bool:
        return True


class AllOrNothing(Wrapped):
    def advance(self, tokens: Sequence[int]) -> int:
        return self.state.advance(tokens) if self.state.copy().advance(tokens) == len(tokens) else 0


FAULTS = (
    NotAdvanced, NotRolledBack, OneTooFewRolledBack, SharedCopy, StaleMask, EndsAllowed, EverythingAllowed,
    NeverFinished, AlwaysAccepting, AllOrNothing,
)  # fmt: skip


class OneState:
    """A grammar whose answers all share a state: the mask of the neighbour."""

    def __init__(self, grammar: Grammar) -> None:
        self.state = grammar.start()

    def start(self) -> GrammarState:
        return self.state


def faulty(make_grammar: object, spec_of: object = None) -> type:
    """LLGuidance with another grammar, or another reading of what is asked."""

    class Faulty(LLGuidance):
        def compile(self, spec: StructuredSpec) -> Grammar:  # type: ignore[override]
            compiled = super().compile(spec_of(spec) if callable(spec_of) else spec)
            return make_grammar(compiled) if callable(make_grammar) else compiled

    return Faulty


def started(fault: type[Wrapped]) -> object:
    class Started:
        def __init__(self, grammar: Grammar) -> None:
            self.grammar = grammar

        def start(self) -> GrammarState:
            return fault(self.grammar.start())

    return Started


def faults_of(component: type) -> list[str]:
    return [result.rule for result in check_component("structured", component) if result.fault]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_state_is_found(fault: type[Wrapped]) -> None:
    assert faults_of(faulty(started(fault)))


def test_answers_that_share_a_state_are_found() -> None:
    assert faults_of(faulty(OneState))


def dropping(keyword: str) -> object:
    def spec_of(spec: StructuredSpec) -> StructuredSpec:
        if spec.kind != "json_schema" or not spec.value.startswith("{"):
            return spec
        try:
            schema = json.loads(spec.value)
        except ValueError:
            return spec
        schema.pop(keyword, None)
        return StructuredSpec(spec.kind, json.dumps(schema), spec.whitespace, spec.after)

    return spec_of


@pytest.mark.parametrize("keyword", ["format", "pattern", "minItems", "oneOf", "uniqueItems", "not", "maxLength"])
def test_a_dropped_keyword_is_found(keyword: str) -> None:
    assert "nothing a schema says is dropped" in faults_of(faulty(None, dropping(keyword)))


def test_reasoning_that_is_not_waited_for_is_found() -> None:
    found = faults_of(faulty(None, lambda spec: StructuredSpec(spec.kind, spec.value, spec.whitespace)))
    assert found == ["the form begins after the reasoning"]


def test_whitespace_that_nobody_asked_for_is_found() -> None:
    found = faults_of(faulty(None, lambda spec: StructuredSpec(spec.kind, spec.value, "any", spec.after)))
    assert found == ["json is compact unless asked otherwise"]
