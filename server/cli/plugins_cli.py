"""`turnout plugins`: what can be chosen, what cannot work here and why, and whether a plugin keeps its contract."""

from __future__ import annotations

import json
from itertools import groupby

import torch

from turnout.core import interfaces, plugins
from turnout.core.choices import ALL_SLOTS
from turnout.core.plugins import Choice, PluginError, Plugins

USAGE = "turnout plugins [--json] | turnout plugins doctor | turnout plugins check SLOT=NAME"


def run(args: list[str]) -> int:
    found = plugins.load()
    match args:
        case [] | ["list"]:
            _show(found)
        case ["--json"] | ["list", "--json"]:
            print(json.dumps([_plain(choice) for choice in _ordered(found)], indent=2))
        case ["doctor"]:
            return _doctor(found)
        case ["check", target] if "=" in target:
            return _check(found, *target.split("=", 1))
        case _:
            raise PluginError(f"usage: {USAGE}")
    return 0


def _ordered(found: Plugins) -> list[Choice]:
    order = list(ALL_SLOTS)
    return sorted(found.choices.values(), key=lambda c: (order.index(c.slot), c.name))


def _plain(choice: Choice) -> dict[str, object]:
    options = {name: {"type": kind, "default": default} for name, kind, default in choice.options}
    return {
        "slot": choice.slot,
        "name": choice.name,
        "package": choice.package,
        "version": choice.version,
        "contract": choice.contract,
        "options": options,
    }


def _show(found: Plugins) -> None:
    for slot, choices in groupby(_ordered(found), key=lambda c: c.slot):
        print(f"{slot}=")
        for choice in choices:
            about = " ".join((choice.component.__doc__ or "").split()).partition(". ")[0]
            print(f"  {choice.name:<18}{choice.package} {choice.version}  {about}")
            for name, kind, default in choice.options:
                print(f"      {slot}.{name}={'null' if default is None else default}  ({kind})")
    if found.faults:
        print(f"\n{len(found.faults)} plugin(s) cannot be used; `turnout plugins doctor` says why")


def _doctor(found: Plugins) -> int:
    """Exit code 1 when something cannot work here."""
    troubles = list(found.faults.values()) + [why for why in found.claimed.values() if why not in found.faults.values()]
    for choice in _ordered(found):
        troubles += [f"{choice.slot}={choice.name} of {choice.package}: {why}" for why in choice.obstacles()]
        if choice.devices and not any(_has(device) for device in choice.devices):
            troubles.append(
                f"{choice.slot}={choice.name} of {choice.package}: needs a device of type {', '.join(choice.devices)}"
            )
        if choice.contract != interfaces.CONTRACTS[choice.slot]:
            troubles.append(
                f"{choice.slot}={choice.name} of {choice.package} was written for version {choice.contract} of the "
                f"contract; {interfaces.CONTRACTS[choice.slot]} is current and the older one goes with the next release"
            )
    for trouble in troubles:
        print(f"- {trouble}")
    print(f"{len(found.choices)} choices, {len(troubles)} trouble(s)")
    return 1 if troubles else 0


def _has(device: str) -> bool:
    return device == "cpu" or (device == "cuda" and torch.cuda.is_available())


def _check(found: Plugins, slot: str, name: str) -> int:
    from turnout.testing import check_component

    choice = found.get(slot, name)
    results = check_component(slot, choice.component)
    for result in results:
        word = "FAIL" if result.fault else "skip" if result.skipped else "ok  "
        why = result.fault or result.skipped
        print(f"{word} {result.rule}{f': {why}' if why else ''}")
    failed = sum(result.fault is not None for result in results)
    skipped = sum(result.skipped is not None for result in results)
    counts = f"{len(results) - failed - skipped} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "")
    print(f"{slot}={name} of {choice.package} {choice.version}: {counts}")
    return 1 if failed else 0
