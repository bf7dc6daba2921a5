"""The contract of runners finds what is planted, and passes what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from turnout.core import Step
from turnout.core.model import Result
from turnout.plugins.runner.model import LocalRunner
from turnout.testing import RunnerContract, check_component
from turnout.testing.policies import rules


@dataclass
class Planted(LocalRunner):
    """A runner that is given another step than it should compute, or says something else of it."""

    def run(self, step: Step) -> Result:
        return self.said(super().run(self.given(step)))

    def given(self, step: Step) -> Step:
        return step

    def said(self, result: Result) -> Result:
        return result


def given(change: Callable[[Step], Step]) -> type:
    return dataclass(type("Faulty", (Planted,), {"given": lambda self, step: change(step)}))


def said(change: Callable[[Result], Result]) -> type:
    return dataclass(type("Faulty", (Planted,), {"said": lambda self, result: change(result)}))


def _shifted(step: Step) -> Step:
    """Keys of later chunks go to the place before theirs."""
    return replace(step, chunks=tuple(c._replace(start=max(0, c.start - 1)) if c.start > 4 else c for c in step.chunks))


def _turned(moves: Any) -> Any:
    return tuple(move._replace(source=move.target, target=move.source) for move in moves)


def _neighbours(step: Step) -> Step:
    """The constraint is taken for that of the first row."""
    if step.constraint is not None:
        step.constraint.rows = (0,)
    return step


class Sequential(Planted):
    """Copies one block after the other."""

    def run(self, step: Step) -> Result:
        for move in step.copies:
            super().run(Step(copies=(move,)))
        return super().run(replace(step, copies=()))


class Unmoved(Planted):
    """Forgets the moves of a step without chunks."""

    def run(self, step: Step) -> Result:
        return super().run(step) if step.chunks else Result([])


class Greedy(Planted):
    def room(self, model: Any, attention: Any, spec: Any) -> tuple[int, str]:
        return 1_000_000, "as much as there is"


SWAPS, COPIES = "blocks swapped out come back as they were", "a copied block goes on by itself"
PLANTED = {
    "a token too many": (said(lambda r: r._replace(tokens=[*r.tokens, 1])), "a prompt and its decodes"),
    "the first token twice": (said(lambda r: r._replace(tokens=r.tokens[:1] * len(r.tokens))), "alike whoever shares"),
    "tokens in another order": (said(lambda r: r._replace(tokens=r.tokens[::-1])), "alike whoever shares"),
    "another token": (said(lambda r: r._replace(tokens=[(t + 1) % 61 for t in r.tokens])), "a prompt and its decodes"),
    "positions off by one": (given(_shifted), "a prompt in chunks"),
    "a chunk in the middle yields": (
        given(lambda s: replace(s, chunks=tuple(c._replace(samples=True) for c in s.chunks))),
        "a prompt in chunks",
    ),
    "no swapping out": (given(lambda s: replace(s, swap_out=())), SWAPS),
    "no swapping in": (given(lambda s: replace(s, swap_in=())), SWAPS),
    "no copies": (given(lambda s: replace(s, copies=())), COPIES),
    "copies the wrong way": (given(lambda s: replace(s, copies=_turned(s.copies))), COPIES),
    "copies one by one": (dataclass(Sequential), "all sources of a copy"),
    "moves only with chunks": (dataclass(Unmoved), "a step that only moves"),
    "no log-probabilities": (said(lambda r: r._replace(logprobs={})), "log probabilities"),
    "scores of other tokens": (
        said(lambda r: r._replace(scores={name: found[::-1] for name, found in r.scores.items()})),
        "log probabilities",
    ),
    "no constraint": (given(lambda s: replace(s, constraint=None)), "a constraint holds"),
    "the constraint of the neighbour": (given(_neighbours), "a constraint holds"),
    "room without end": (dataclass(Greedy), "its cache fits the memory"),
}


def faults(component: type, **options: Any) -> dict[str, str]:
    return {found.rule: found.fault for found in check_component("runner", component, options) if found.fault}


def test_the_runner_that_ships_keeps_the_contract_with_every_option_that_runs_here() -> None:
    assert not faults(LocalRunner) and not faults(LocalRunner, async_scheduling=True)


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_planted_is_found_by_the_rule_it_breaks(fault: str) -> None:
    component, rule = PLANTED[fault]
    (check,) = (check for name, check in rules(RunnerContract, component) if rule in name)
    with pytest.raises(AssertionError, match=r"\w \w"):
        check()


def test_a_runner_that_lacks_what_it_inherits_or_takes_other_arguments_is_refused_with_both_signatures() -> None:
    lacking = dataclass(
        type("Lacking", (), {name: getattr(LocalRunner, name) for name in ("prepare", "room", "start")})
    )
    lacking.replays = LocalRunner.replays  # type: ignore[attr-defined]
    assert "Lacking lacks run" in str(check_component("runner", lacking)[0].fault)
    other = dataclass(type("Other", (LocalRunner,), {"run": lambda self: None}))
    assert "Other.run(self) can't be called as run(step)" in str(check_component("runner", other)[0].fault)
