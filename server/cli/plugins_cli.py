"""`turnout plugins`: what can be chosen, what cannot work here and why, and whether a plugin keeps its contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from importlib.metadata import entry_points
from itertools import groupby
from typing import Any

import torch

from turnout.compose import plugins
from turnout.compose.choices import ALL_SLOTS, REQUIRED
from turnout.compose.plugins import Choice, PluginError, Plugins, options_of
from turnout.core import hooks, interfaces
from turnout.server.cli.keys import comments, did_you_mean

USAGE = """\
turnout plugins [--json] [plugin=FILE]                   every choice of every slot, with its options
turnout plugins doctor                                   packages, what each offers, what cannot be used and why
turnout plugins check SLOT=NAME [OPTION=VALUE ...]       the rules of the slot's contract, one after the other
turnout plugins new SLOT NAME [FOLDER]                   a package for a plugin of your own, with its tests
"""


def run(args: list[str]) -> int:
    match args:
        case [] | ["list"]:
            _show(plugins.load())
        case ["--json"] | ["list", "--json"]:
            print(json.dumps([_plain(choice) for choice in _ordered(plugins.load())], indent=2))
        case ["doctor"]:
            return _doctor(plugins.load())
        case ["check", target, *options] if "=" in target:
            slot, _, name = target.partition("=")
            return _check(plugins.load(), slot, name, options)
        case ["new", slot, name, *folder] if len(folder) < 2:
            from turnout.server.cli.new_plugin import write

            print(write(slot, name, *folder))
        case ["-h" | "--help"]:
            print(USAGE, end="")
        case _:
            raise PluginError(f"turnout plugins takes:\n{USAGE.rstrip()}")
    return 0


def _ordered(found: Plugins) -> list[Choice]:
    order = list(ALL_SLOTS)
    return sorted(found.choices.values(), key=lambda c: (order.index(c.slot), c.name))


def _plain(choice: Choice) -> dict[str, object]:
    about = comments(choice.component)
    return {
        "slot": choice.slot,
        "name": choice.name,
        "package": choice.package,
        "version": choice.version,
        "contract": choice.contract,
        "options": {
            name: {"type": kind, "default": _as_json(default), "help": about.get(name, "")}
            for name, kind, default in choice.options
        },
    }


def _as_json(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _show(found: Plugins) -> None:
    for slot, choices in groupby(_ordered(found), key=lambda c: c.slot):
        print(f"{slot}=")
        for choice in choices:
            about, text = comments(choice.component), " ".join((choice.component.__doc__ or "").split())
            print(f"  {choice.name:<18}{choice.package} {choice.version}  {text.partition('. ')[0]}")
            for name, kind, default in choice.options:
                value = "null" if default is None else "(required)" if default == REQUIRED else _as_json(default)
                line = f"      {slot}.{name}={value}  ({kind})"
                print(f"{line}  {about[name]}" if about.get(name) else line)
    if found.faults:
        print(f"\n{len(found.faults)} plugin(s) cannot be used; `turnout plugins doctor` says why")


def _doctor(found: Plugins) -> int:
    """Exit code 1 when something is wrong; what merely is not for this machine is no fault."""
    for package, sources in groupby(sorted(found.sources, key=lambda s: s.package), key=lambda s: s.package):
        own = list(sources)
        offers = [f"{c.slot}={c.name}" for c in _ordered(found) if c.package == package]
        offered = ", ".join(offers) if len(offers) <= 6 else f"{len(offers)} choices"
        print(f"{package} {own[0].version}: {offered or 'no choices'}; loaded in {sum(s.seconds for s in own):.2f} s")
        for source in own:
            if source.blocked:
                print(f"  {source.plugin} is blocked by TURNOUT_BLOCK")
    elsewhere: list[str] = []
    wrong = [*found.faults.values(), *_shadowed(found)]
    for choice in _ordered(found):
        title = f"{choice.slot}={choice.name} of {choice.package}"
        for why in choice.obstacles():
            (wrong if why.startswith("its obstacle() fails") else elsewhere).append(f"{title}: {why}")
        if choice.devices and not any(_has(device) for device in choice.devices):
            elsewhere.append(f"{title}: needs a device of type {', '.join(sorted(choice.devices))}")
        current = hooks.CONTRACTS[choice.slot]
        if choice.contract != current:
            wrong.append(
                f"{title} was written for version {choice.contract} of the contract; {current} is current and the older one "
                f"goes with the next release"
            )
    for heading, lines in (("not for this machine", elsewhere), ("wrong", wrong)):
        print("\n".join([f"\n{heading}:", *(f"- {line}" for line in lines)]) if lines else f"\nnothing {heading}")
    return 1 if wrong else 0


def _shadowed(found: Plugins) -> Iterator[str]:
    """Presets of a package that nobody can ask for, since an earlier package has one of that name."""
    from importlib.resources import files

    seen: dict[str, str] = {}
    for package in ("turnout.conf", *found.presets):
        root = files(package)
        for group in (entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("_")):
            for file in (entry.name for entry in group.iterdir() if entry.name.endswith(".yaml")):
                preset = f"{group.name}={file.removesuffix('.yaml')}"
                if (first := seen.setdefault(preset, package)) != package:
                    yield f"{preset} of {package} is never found: {first} has one of that name; rename it"


def _has(device: str) -> bool:
    return device == "cpu" or (device == "cuda" and torch.cuda.is_available())


def _check(found: Plugins, slot: str, name: str, given: list[str]) -> int:
    kits = entry_points(group="turnout.kits", name="check")
    if not kits:
        raise PluginError("this installation has no kits of rules: install Turnout anew, as `pip install -e .` does")
    choice = found.get(slot, name)
    if choice.component is interfaces.Auto:
        raise PluginError(f"{slot}=auto stands for another choice; check that one: {', '.join(found.names(slot))}")
    options = _options(choice, given)
    if why := [
        *choice.obstacles(),
        *([] if choice.devices is None or any(map(_has, choice.devices)) else ["no device"]),
    ]:
        print(
            f"skip all rules: {'; '.join(why)}\n{slot}={name} of {choice.package} {choice.version}: nothing was tried here"
        )
        return 0
    results = next(iter(kits)).load()(slot, choice.component, options)
    for result in results:
        word = "FAIL" if result.fault else "skip" if result.skipped else "ok  "
        why_not = result.fault or result.skipped
        print(f"{word} {result.rule}{f': {why_not}' if why_not else ''}")
    failed = sum(result.fault is not None for result in results)
    skipped = sum(result.skipped is not None for result in results)
    counts = f"{len(results) - failed - skipped} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "")
    print(f"{slot}={name} of {choice.package} {choice.version}: {counts}")
    return 1 if failed else 0


def _options(choice: Choice, given: list[str]) -> dict[str, Any]:
    """The component's options by name, those given on the command line among them. Raises PluginError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = {name for name, _, _ in choice.options}
    pairs = [option.removeprefix(f"{choice.slot}.").partition("=") for option in given]
    for option, (key, equals, _) in zip(given, pairs, strict=True):
        if key.partition(".")[0] not in known or not equals:
            listed = f"its options are {', '.join(sorted(known))}" if known else "it has no options"
            raise PluginError(
                f"{option} is no option of {choice.slot}={choice.name}{did_you_mean(key, known) or f'; {listed}'}"
            )
    try:
        node = OmegaConf.merge(
            OmegaConf.structured(choice.component),
            OmegaConf.from_dotlist([f"{key}={value}" for key, _, value in pairs]),
        )
        if lacking := sorted(OmegaConf.missing_keys(node)):
            raise PluginError(f"{choice.slot}={choice.name} needs {', '.join(f'{key}=VALUE' for key in lacking)}")
        return options_of(OmegaConf.to_object(node)) if given else {}
    except (OmegaConfBaseException, ValueError) as error:
        raise PluginError(f"{choice.slot}={choice.name}: {str(error).splitlines()[0]}") from error
