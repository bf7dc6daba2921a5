"""What an installed package may do wrong costs that package, by name, and nobody else: written cases, then made-up ones.

Each package is an importable module behind an entry point of a distribution of its own, all of them installed at once.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from turnout.compose import plugins
from turnout.compose.plugins import PluginError, Plugins
from turnout.server.cli import plugins_cli
from turnout.server.cli.overrides import checked, objects, try_composing

OWN = list(entry_points(group="turnout"))
HEAD = """
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Optional
from turnout.core import Capabilities, Draft, Policy, PreemptMode, hookimpl
import turnout.core
"""
SCHEDULER = """
@dataclass
class Mine:
    {options}
    def schedule(self, waiting, running, draft): ...
"""
OFFER = """
@hookimpl
def register_{slots}(register):
    register({name!r}, {component})
"""


def offers(name: str, options: str = "pass", component: str = "Mine", before: str = "") -> str:
    return (
        HEAD
        + before
        + SCHEDULER.format(options=options)
        + OFFER.format(slots="schedulers", name=name, component=component)
    )


def registers(slots: str, body: str, name: str = "mine") -> str:
    return HEAD + body + OFFER.format(slots=slots, name=name, component="Mine")


# what it is -> (its source, what is said of it; None: nothing, it is fine)
PACKAGES: dict[str, tuple[str, str | None]] = {
    "good": (offers("good", "limit: int = 3"), None),
    # at import
    "a module that is missing": ("import a_module_nobody_has", "ModuleNotFoundError"),
    "a syntax error": ("def broken(:", "SyntaxError"),
    "an exception": ("raise RuntimeError('its own bug')", "its own bug"),
    "sys.exit": ("import sys; sys.exit(3)", "SystemExit"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "an exception without end": ("class E(BaseException): ...\nraise E", "it raised E"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "sleeping": ("import time; time.sleep(60)", "was not done after"),
    "looping": ("while True: pass", "was not done after"),
    "printing": ("print('{')\n" + offers("printing"), None),
    # in its hooks
    "no mark on the hook": (offers("unmarked").replace("@hookimpl", ""), "not marked with @hookimpl"),
    "an unknown hook": (HEAD + "@hookimpl\ndef register_shedulers(register): ...", "register_shedulers"),
    "an unknown argument": (HEAD + "@hookimpl\ndef register_schedulers(where): ...", "where"),
    "raising half-way": (offers("half") + "    raise RuntimeError('half-way')", "half-way"),
    "registering without end": (offers("endless") + "    while True: pass", "was not done after"),
    "too many arguments": (offers("x").replace("Mine)", "Mine, 3)"), "TypeError"),
    "a module of ours": ("import sys, turnout.plugins.scheduler as s; sys.modules[__name__] = s", "already registered"),
    "presets that are not there": (
        HEAD + "@hookimpl\ndef register_presets(register_presets): register_presets('no_such.conf')",
        "register_presets",
    ),
    "a preset package that is not there": (
        HEAD + "@hookimpl\ndef register_presets(register): register('no_such_package.conf')",
        "no such package",
    ),
    "nothing at all": ("", None),
    # names
    "the name of a built-in": (offers("fcfs"), "is Turnout's own"),
    "the name auto": (registers("attention", SCHEDULER.format(options="pass"), "auto"), "lacks allocate"),
    "a replacement": (offers("fcfs").replace("Mine)", "Mine, replaces='fcfs')"), None),
    "a replacement of another": (offers("fair").replace("Mine)", "Mine, replaces='fcfs')"), "is Turnout's own"),
    "a name with a slash": (offers("a/b"), "is no name for a choice"),
    "a name with a dot": (offers("a.yaml"), "is no name for a choice"),
    "no name": (offers(""), "is no name for a choice"),
    "a class of ours": (offers("ours", component="FCFS", before="from turnout.plugins.scheduler import FCFS\n"), "already"),
    # components
    "a function": (offers("function", component="print"), "must be a class"),
    "a plain class": (offers("plain", component="Path"), "must be a dataclass"),
    "an object": (offers("object", component="Mine()"), "is an object; register its class, Mine"),
    "None": (offers("none", component="None"), "must be a class"),
    "a forgotten decorator": (
        HEAD + "from turnout.plugins.scheduler import Priority\nclass Mine(Priority):\n    limit: int = 3\n"
        + OFFER.format(slots="schedulers", name="bare", component="Mine"),
        "not decorated with @dataclass, so limit",
    ),
    "a policy that is no dataclass": (
        HEAD + "class Mine(Policy):\n    limit: int = 3\n" + OFFER.format(slots="schedulers", name="bare", component="Mine"),
        "must be a dataclass",
    ),
    "a lying metaclass": (
        HEAD + "class M(type):\n    def __getattribute__(c, n): raise RuntimeError('no')\n"
        "class Mine(metaclass=M): ...\n" + OFFER.format(slots="schedulers", name="meta", component="Mine"),
        "RuntimeError: no",
    ),
    "a missing method": (registers("schedulers", "@dataclass\nclass Mine: ..."), "Mine lacks schedule"),
    "too few arguments": (
        offers("few").replace("waiting, running, draft", "draft"),
        "Mine.schedule(self, draft) can't be called as schedule(waiting, running, draft)",
    ),
    "too many wanted": (offers("many").replace("draft)", "draft, more)"), "missing a required argument: 'more'"),
    "an async method": (offers("async").replace("def schedule", "async def schedule"), "neither async nor a generator"),
    "a generator": (offers("gen").replace("): ...", "): yield"), "neither async nor a generator"),
    "a value for a method": (registers("schedulers", "@dataclass\nclass Mine:\n    schedule = 3"), "must be a method"),
    "a method for a value": (
        registers("preemptions", "@dataclass\nclass Mine:\n    def num_host_blocks(self): ...\n"
                  "    def victim(self, c, d): ...\n    def mode(self, r, d): ..."),
        "make it a @property",
    ),
    "a wrong inherited method": (
        HEAD + "@dataclass\nclass Mine(Policy):\n    def schedule(self): ...\n"
        + OFFER.format(slots="schedulers", name="inherits", component="Mine"),
        "can't be called as schedule",
    ),
    "a runner that only starts": (
        registers("runners", "@dataclass\nclass Mine:\n    replays: bool = False\n    def prepare(self, i, l, p): ...\n"
                  "    def room(self, m, a, s): ...\n    def start(self, m, a, s, d, e, n): ..."),
        "lacks run",
    ),
    "half of an optional contract": (
        registers("block_managers", "from turnout.plugins.blocks.paged import PagedBlocks\n@dataclass\n"
                  "class Mine(PagedBlocks):\n    settle = property()\n    fork = 3"),
        "must be a method",
    ),
    "capabilities that are none": (
        registers("attention", "@dataclass\nclass Mine:\n    capabilities: ClassVar[Any] = {}\n    def allocate(self, s, d, e): ...\n"
                  "    def plan(self, b, l, s): ...\n    def run(self, q, k, v, c, p, s): ..."),
        "must be a Capabilities",
    ),
    "formats as text": (
        registers("quantizers", "@dataclass\nclass Mine:\n    checkpoint_formats: ClassVar[Any] = 'gptq'\n"
                  "    def linear(self, n, t): ..."),
        "must be a frozenset",
    ),
    "an obstacle of objects": (
        offers("obstacle", "pass").replace("    def sch", "    def obstacle(self): ...\n    def sch"), "make it a @staticmethod"
    ),
    "an obstacle that raises": (
        offers("raises", "@staticmethod\n    def obstacle(): raise RuntimeError('no device')"), None
    ),
    "a version to come": (offers("later", "contract: ClassVar[int] = 9"), "written for version 9"),
    "a version in words": (offers("words", "contract: ClassVar[str] = '1'"), "written for version '1'"),
    "a version before the first": (offers("zero", "contract: ClassVar[int] = 0"), "written for version 0"),
    # options
    "an optional int": (offers("optional", "limit: int | None = None"), None),
    "an optional of the old kind": (offers("old", "limit: Optional[int] = 3"), None),
    "an enum": (offers("enum", "join: Join = Join.ONE", before="class Join(Enum):\n    ONE = 1\n"), None),
    "a path": (offers("path", "where: Path = Path('/tmp')"), None),
    "a list": (offers("list", "tenants: list[str] = field(default_factory=lambda: ['a'])"), None),
    "a required option": (offers("required", "limit: int"), None),
    "an option called score": (
        HEAD + "@dataclass\nclass Mine(Policy):\n    score: float = 1.0\n"
        + OFFER.format(slots="schedulers", name="scored", component="Mine"),
        "its option score hides the method score",
    ),
    "an option called schedule": (registers("schedulers", "@dataclass\nclass Mine:\n    schedule: int = 1"), "hides the method"),
    "an option called defaults": (offers("defaults", "defaults: int = 1"), "an option can't be called defaults"),
    "an option called _target_": (offers("target", "_target_: str = 'os.system'"), "an option can't be called _target_"),
    "an option called contract": (offers("version", "contract: int = 1"), "an option can't be called contract"),
    "an option called name": (offers("named", "name: str = 'x'"), None),
    "an option of any class": (offers("odd", "where: complex = 1j"), "the configuration can't hold its option where"),
    "a default that raises": (offers("dice", "seed: int = field(default_factory=lambda: 1 // 0)"), "it can't be looked at"),
}  # fmt: skip


class Installer:
    """Writes packages and collects them with ours."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.entries, self.count = folder, list(OWN), 0

    def add(self, source: str, entry: str = "plugin", package: str = "") -> str:
        """The distribution's name."""
        self.count += 1
        module, package = f"turnout_faulty_{id(self)}_{self.count}", package or f"pkg{self.count}"
        (self.folder / f"{module}.py").write_text(source)
        made = EntryPoint(entry, module, "turnout")
        vars(made)["dist"] = types.SimpleNamespace(name=package, version="1.0")
        self.entries.insert(0, made)
        return package

    def collect(self) -> Plugins:
        return plugins.collect(self.entries)


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TURNOUT_IMPORT_SECONDS", "0.3")
    monkeypatch.delenv("TURNOUT_BLOCK", raising=False)
    yield Installer(tmp_path)
    for name in [name for name in sys.modules if name.startswith("turnout_faulty_")]:
        del sys.modules[name]


def unharmed(found: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours are all there and are what they were; the defaults compose; every listing works."""
    ours = plugins.collect(OWN)
    for key, choice in ours.choices.items():
        assert found.get(*key) == choice
    config = objects(try_composing("serve", checked(["scheduler=fcfs", "blocks=radix"], found), found), found)
    assert type(config.scheduler) is ours.get("scheduler", "fcfs").component
    monkeypatch.setattr(plugins, "load", lambda: found)
    capsys.readouterr()
    assert plugins_cli.run([]) == 0
    assert "scheduler=" in capsys.readouterr().out
    assert plugins_cli.run(["--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(found.choices)
    plugins_cli.run(["doctor"])


def test_each_of_many_faulty_packages_costs_itself_alone(
    installer: Installer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {case: installer.add(source) for case, (source, _) in PACKAGES.items()}
    found = installer.collect()
    wrong = {}
    for case, package in names.items():
        said, wanted = [why for why in found.faults.values() if f" of {package} 1.0" in why], PACKAGES[case][1]
        if bool(said) != (wanted is not None) or not any((wanted or "") in why for why in said or [""]):
            wrong[case] = said
    assert not wrong
    unharmed(found, monkeypatch, capsys)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("import of") and _spins(thread)]
    for name in ("good", "optional", "old", "enum", "path", "list", "named", "printing", "raises", "required"):
        assert found.get("scheduler", name).options is not None
    assert type(objects(try_composing("serve", ["scheduler=enum"], found), found).scheduler).__name__ == "Mine"


def _spins(thread: threading.Thread) -> bool:
    thread.join(2.0)
    return thread.is_alive() and "sleeping" not in thread.name and not _sleeps(thread)


def _sleeps(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is None or "time.sleep" in Path(frame.f_code.co_filename).read_text()


@pytest.mark.parametrize("entry", [*(entry.name for entry in OWN), "core", "turnout"])
def test_an_entry_point_named_like_one_of_ours_takes_nothings_place(installer: Installer, entry: str) -> None:
    package = installer.add(PACKAGES["good"][0], entry, "a_package")
    found = installer.collect()
    assert not found.faults and found.get("scheduler", "good").package == package
    assert {key for key, c in found.choices.items() if c.package == "turnout"} == set(plugins.collect(OWN).choices)


def test_a_package_and_a_name_always_name_one_exactly(installer: Installer) -> None:
    for package in ("one", "two"):
        installer.add(offers("same", f"limit: int = {len(package)}"), package=package)
    installer.add(PACKAGES["a replacement"][0], package="three")
    found = installer.collect()
    with pytest.raises(PluginError, match="Choose scheduler=(one|two):same or scheduler=(one|two):same"):
        found.get("scheduler", "same")
    for package, name in (("one", "same"), ("two", "same"), ("three", "fcfs"), ("turnout", "fcfs")):
        overrides = checked([f"scheduler={package}:{name}"], found)
        made = objects(try_composing("serve", overrides, found), found)
        kind = found.get("scheduler", f"{package}:{name}")
        assert type(made.scheduler) is kind.component and kind.package == package
    assert found.get("scheduler", "fcfs").package == "turnout"


@pytest.mark.parametrize("named", ["plugin", "a_package", "a_package:plugin"])
def test_a_package_is_blocked_by_each_of_its_names(
    installer: Installer, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer.add("raise RuntimeError", package="a_package")
    monkeypatch.setenv("TURNOUT_BLOCK", named)
    found = installer.collect()
    assert not found.faults and [s.package for s in found.sources if s.blocked] == ["a_package"]


PIECES: dict[str, tuple[str, ...]] = {
    "options": tuple(
        f"{name}: {kind}{default}"
        for name in (
            "limit",
            "score",
            "order",
            "name",
            "defaults",
            "_x",
            "hydra",
            "schedule",
            "capabilities",
            "priority",
        )
        for kind in ("int", "str | None", "list[int]", "dict", "'Nowhere'", "Any", "object", "ClassVar[int]", "3")
        for default in ("", " = None", " = 3", " = 'x'", " = []", " = field(default_factory=list)", " = object()")
    ),
    "name": ("fcfs", "auto", "none", "x", "torch", "paged", "a b", "é", "None", "_", "9", "defaults", "x" * 300),
    "component": (
        "Mine",
        "Mine()",
        "Policy",
        "int",
        "None",
        "'Mine'",
        "lambda: Mine()",
        "type",
        "Exception",
        "Draft",
        "[]",
    ),
    "slots": tuple(hook.removeprefix("register_") for hook, _ in plugins.ALL_SLOTS.values()),
    "method": ("schedule", "linear", "run", "victim", "plan", "grow", "find", "convert", "obstacle", "kernels", "fork"),
    "arguments": ("", "self", "self, a", "self, a, b, c", "*a", "**k", "self, *, a", "self, a, b, c, d, e, f, g"),
    "mark": ("@hookimpl", "", "@hookimpl(tryfirst=True)", "@hookimpl(wrapper=True)", "@staticmethod"),
    "around": ("", "@property\n    ", "@staticmethod\n    ", "async ", "@classmethod\n    "),
    "body": ("...", "yield", "raise SystemExit", "return 3"),
    "after": ("", "raise ValueError", "del Mine", "hookimpl = None", "import no_such_thing", "__all__ = 3"),
}


@pytest.mark.parametrize("seed", range(3))
def test_made_up_packages_cost_themselves_alone(
    seed: int, installer: Installer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(seed)
    for _ in range(40):
        pick: dict[str, Any] = {what: dice.choice(ways) for what, ways in PIECES.items()}
        source = (
            f"{HEAD}@dataclass\nclass Mine{dice.choice(('', '(Policy)'))}:\n    {pick['options']}\n"
            f"    {pick['around']}def {pick['method']}({pick['arguments']}): {pick['body']}\n"
            f"{pick['mark']}\ndef register_{pick['slots']}(register):\n    register({pick['name']!r}, {pick['component']})\n"
            f"{pick['after']}\n"
        )
        installer.add(source, dice.choice(("plugin", "scheduler", "attention", "mine")))
    unharmed(installer.collect(), monkeypatch, capsys)
