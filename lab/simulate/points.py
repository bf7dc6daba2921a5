"""The command line of `turnout simulate`, `bench` and `tune` as the compositions to compare. It composes nothing.

scheduler=fcfs,fair workload=a.csv   ─▶   [scheduler=fcfs workload=trace workload.path='a.csv']
                                          [scheduler=fair workload=trace workload.path='a.csv']
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from pathlib import Path
from typing import NamedTuple

from turnout.compose.plugins import SLOTS, Plugins
from turnout.lab.simulate.config import LATENCIES, WORKLOADS
from turnout.lab.workload.trace import TraceFile
from turnout.server.cli.overrides import Usage
from turnout.server.cli.texts import quoted

FILES = ("out", "markdown", "plot", "latency.log", "latency.model", "workload.path")  # quoted for Hydra where needed
MOST = 1000  # compositions


class Point(NamedTuple):
    """One composition."""

    varied: dict[str, str]  # what tells it from the others
    overrides: list[str]

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.varied.items())


class _Alternative(NamedTuple):
    """One thing an argument may stand for."""

    key: str
    value: str  # as it is shown
    overrides: list[str]


def expand(args: list[str], found: Plugins) -> list[Point]:
    """Every combination of the comma lists (and of Hydra's `range(…)`, `choice(…)`).

    An option of a part that varies goes to those of its choices that have it. Raises Usage for one that none has.
    """
    lists = [_alternatives(arg) for arg in args]
    points: list[Point] = []
    used: set[int] = set()
    for picked in itertools.product(*lists):
        chosen = {one.key: one.value for one in picked}
        kept = [i for i, one in enumerate(picked) if _has(one.key, chosen, lists, found)]
        used.update(kept)
        varied = {picked[i].key: picked[i].value for i in kept if len(lists[i]) > 1}
        point = Point(varied, [override for i in kept for override in picked[i].overrides])
        if point not in points:
            points.append(point)
        if len(points) > MOST:
            raise Usage(f"the comma lists make more than {MOST} compositions; vary fewer things at once")
    for i in set(range(len(lists))) - used:
        key = lists[i][0].key
        raise Usage(f"{key}: none of the choices given for {key.partition('.')[0]} has this option")
    return points


def _has(key: str, chosen: dict[str, str], lists: list[list[_Alternative]], found: Plugins) -> bool:
    """Whether the option belongs to the choice of its group; Hydra judges those of groups that do not vary."""
    group, _, option = key.partition(".")
    if not option or not any(len(options) > 1 and options[0].key == group for options in lists):
        return True
    name = chosen[group]
    if group in SLOTS:
        component: type = found.get(group, name).component
    elif group in ("workload", "latency"):
        component = LATENCIES[name] if group == "latency" else WORKLOADS.get(name, TraceFile)
    else:
        return True
    return option.partition(".")[0] in {spec.name for spec in dataclasses.fields(component)}


def _alternatives(arg: str) -> list[_Alternative]:
    """What an argument may stand for: one thing, or several of which each composition has one."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = arg.partition("=")
    if key == "workload" and equals:
        names = [value[1:-1]] if re.fullmatch(r"'.*'|\".*\"", value) else value.split(",")
        return [_workload(name) for name in names]
    if key in FILES and not re.match(r"['\"]|null$", value):
        names = value.split(",") if key == "latency.model" else [value]
        return [_Alternative(key, name, [f"{key}={quoted(name)}"]) for name in names]
    with contextlib.suppress(HydraException):
        override = OverridesParser.create().parse_override(arg)
        if override.is_sweep_override():
            return [_Alternative(key, one, [f"{key}={one}"]) for one in override.sweep_string_iterator()]
    return [_Alternative(key, value, [arg])]


def _workload(value: str) -> _Alternative:
    """The name of a workload, or a file with a trace. Raises Usage for a path where nothing is."""
    if value in WORKLOADS or (re.fullmatch(r"[\w-]+", value) and not Path(value).is_file()):
        return _Alternative("workload", value, [f"workload={value}"])  # Hydra knows the names, and lists them
    if not Path(value).is_file():
        raise Usage(f"workload={value}: there is no such file; workloads that need none are {', '.join(WORKLOADS)}")
    return _Alternative("workload", Path(value).name, ["workload=trace", f"workload.path={quoted(value)}"])
