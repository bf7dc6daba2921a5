"""The rules of each contract as checks with a name, run by `turnout plugins check SLOT=NAME`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import SkipTest

from turnout.compose.choices import problem
from turnout.testing.attention_contract import attention_rules
from turnout.testing.blocks import block_rules
from turnout.testing.formats import FormatContract
from turnout.testing.loader import LoaderContract
from turnout.testing.parsers import ReasoningParserContract, ToolParserContract
from turnout.testing.policies import PreemptionContract, SchedulerContract, rules
from turnout.testing.quant import quant_rules
from turnout.testing.runner import RunnerContract
from turnout.testing.structured import StructuredContract


@dataclass(frozen=True)
class Checked:
    """One rule, and what was wrong; None: it holds, or was skipped."""

    rule: str
    fault: str | None
    skipped: str | None = None  # why it does not apply here


def check_component(slot: str, component: type, options: Mapping[str, Any] | None = None) -> list[Checked]:
    """Run every rule of the slot's contract against a component with these options, by default its own."""
    make = partial(component, **options or {})
    if why := problem(slot, "checked", component):
        return [Checked("it keeps the form of its contract", why)]
    results = [Checked("it keeps the form of its contract", None), _checked("its options are valid", make)]
    if all(r.fault is None for r in results):
        results += _all(_RULES[slot], component if not options else _with(component, make))
    return results


def _with(component: type, make: Callable[[], Any]) -> type:
    """A class that stands for the component made with options."""
    return type(component.__name__, (component,), {"__new__": lambda cls: make(), "__init__": lambda self: None})


def _checked(rule: str, check: Callable[[], object]) -> Checked:
    try:
        check()
    except SkipTest as reason:
        return Checked(rule, None, str(reason))
    except Exception as error:  # noqa: BLE001  any fault of the plugin is the answer
        return Checked(rule, f"{type(error).__name__}: {error}".strip() if str(error) else _broken(error))
    return Checked(rule, None)


def _broken(error: Exception) -> str:
    """What did not hold, as the source of the rule says it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = (last.line or "").removeprefix("assert ")
    return f"{type(error).__name__}: it does not hold that {said}" if said else type(error).__name__


def _all(rules_of: Callable[[type], Iterator[tuple[str, Callable[[], object]]]], component: type) -> list[Checked]:
    """Every rule tried; a component that breaks where its rules are looked for fails one of that name."""
    found: list[Checked] = []
    try:
        found += (_checked(rule, check) for rule, check in rules_of(component))
    except Exception as error:  # noqa: BLE001  a stranger's code
        found.append(Checked("its abilities can be looked at", f"{type(error).__name__}: {error}"))
    return found


_RULES: dict[str, Callable[[type], Iterator[tuple[str, Callable[[], object]]]]] = {
    "scheduler": lambda component: rules(SchedulerContract, component),
    "attention": attention_rules,
    "blocks": block_rules,
    "preemption": lambda component: rules(PreemptionContract, component),
    "quant": quant_rules,
    "runner": lambda component: rules(RunnerContract, component),
    "loader": lambda component: rules(LoaderContract, component),
    "format": lambda component: rules(FormatContract, component),
    "tool_parser": lambda component: rules(ToolParserContract, component),
    "reasoning_parser": lambda component: rules(ReasoningParserContract, component),
    "structured": lambda component: rules(StructuredContract, component),
}

__all__ = ["Checked", "check_component"]
