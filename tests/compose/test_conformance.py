"""A class is held to every member of its contract, inherited ones too, and to what the engine calls it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from turnout.compose.choices import ALL_SLOTS, OPTIONAL, Choice, problem
from turnout.compose.conformance import members
from turnout.compose.plugins import load

OURS = [choice for choice in load().choices.values() if choice.package == "turnout" and choice.name != "auto"]


def changed(choice: Choice, name: str, member: object) -> str | None:
    return problem(choice.slot, "mine", type("Mine", (choice.component,), {name: member}))


def one_of(slot: str) -> Choice:
    return next(choice for choice in OURS if choice.slot == slot)


def test_what_ships_keeps_its_contracts() -> None:
    assert {choice.slot for choice in OURS} == set(ALL_SLOTS)
    assert not [why for choice in OURS if (why := problem(choice.slot, "mine", choice.component))]


@pytest.mark.parametrize("slot", ALL_SLOTS)
def test_every_method_of_every_contract_is_missed_and_its_arguments_are_looked_at(slot: str) -> None:
    choice, protocol = one_of(slot), ALL_SLOTS[slot][1]
    methods = [name for name, member in members(protocol).items() if callable(member)]
    assert methods
    for name in methods:
        bare: Any = type(
            "Bare", (), {other: getattr(choice.component, other, None) for other in methods if other != name}
        )
        bare.__dataclass_fields__ = {}
        assert name in str(problem(slot, "mine", bare)), f"{name} is not missed"
        wrong = changed(choice, name, lambda self, *, only_by_name: None)
        assert f"Mine.{name}(self, *, only_by_name) can't be called as {name}(" in str(wrong), wrong
        assert "must be a method" in str(changed(choice, name, 3))


def test_members_that_a_contract_inherits_are_among_them() -> None:
    assert {"run", "start", "prepare", "room", "replays"} <= set(members(ALL_SLOTS["runner"][1]))


@pytest.mark.parametrize(
    "method",
    [
        lambda self, waiting, running, draft: None,
        lambda self, w, r, d: None,
        lambda *anything: None,
        lambda self, w, r, d, more=3: None,
        lambda self, w, /, r, d, **named: None,
        staticmethod(lambda w, r, d: None),
        classmethod(lambda cls, w, r, d: None),
    ],
)
def test_whatever_can_be_called_as_the_engine_does_is_taken(method: Callable[..., Any]) -> None:
    assert changed(one_of("scheduler"), "schedule", method) is None


def test_optional_members_are_held_to_their_protocols_too() -> None:
    for slot, protocols in OPTIONAL.items():
        for protocol in protocols:
            kinds = [
                c
                for c in OURS
                if c.slot == slot
                and all(hasattr(c.component, n) for n in members(protocol) if callable(members(protocol)[n]))
            ]
            name = next(
                name
                for name, member in members(protocol).items()
                if callable(member) or isinstance(member, staticmethod)
            )
            for choice in kinds[:1]:
                assert name in str(changed(choice, name, lambda self, *, only_by_name: None)), (slot, name)
