"""The rules of each contract as checks with a name, run by `turnout plugins check SLOT=NAME`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import SkipTest

from turnout.core.plugins import SLOTS
from turnout.testing.attention_contract import attention_rules
from turnout.testing.blocks import block_rules
from turnout.testing.policies import PreemptionContract, SchedulerContract, rules
from turnout.testing.quant import quant_rules


@dataclass(frozen=True)
class Checked:
    """One rule, and what was wrong; None: it holds, or was skipped."""

    rule: str
    fault: str | None
    skipped: str | None = None  # why it does not apply here


def check_component(slot: str, component: type) -> list[Checked]:
    """Run every rule of the slot's contract against a component with its default options."""
    results = [_checked("its methods take the arguments of the contract", lambda: _signatures(slot, component))]
    results.append(_checked("its defaults are valid options", component))
    if all(r.fault is None for r in results):
        results += [_checked(rule, check) for rule, check in _RULES[slot](component)]
    return results


def _checked(rule: str, check: Callable[[], object]) -> Checked:
    try:
        check()
    except SkipTest as reason:
        return Checked(rule, None, str(reason))
    except Exception as error:  # noqa: BLE001  any fault of the plugin is the answer
        return Checked(rule, f"{type(error).__name__}: {error}".strip())
    return Checked(rule, None)


def _signatures(slot: str, component: type) -> None:
    for name, wanted in inspect.getmembers(SLOTS[slot][1], inspect.isfunction):
        if name.startswith("_"):
            continue
        given = inspect.signature(getattr(component, name))
        names = list(inspect.signature(wanted).parameters)
        try:
            given.bind(*names)
        except TypeError as error:
            raise TypeError(f"{name}{given} must take {', '.join(names[1:]) or 'nothing'}: {error}") from error


_RULES: dict[str, Callable[[type], Iterator[tuple[str, Callable[[], object]]]]] = {
    "scheduler": lambda component: rules(SchedulerContract, component),
    "attention": attention_rules,
    "blocks": block_rules,
    "preemption": lambda component: rules(PreemptionContract, component),
    "quant": quant_rules,
}

__all__ = ["Checked", "check_component"]
