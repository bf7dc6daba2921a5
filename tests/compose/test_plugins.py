"""Finding plugins: what is broken is named with its package and the remedy, and stops nobody else."""

from __future__ import annotations

import itertools
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from turnout.compose import plugins
from turnout.compose.plugins import PluginError
from turnout.core import hookimpl, interfaces
from turnout.plugins.scheduler import FCFS


@dataclass
class Mine:
    chunk: int = 5

    def schedule(self, waiting: Any, running: Any, draft: Any) -> None: ...


def offering(name: str, component: Any, hook: str = "register_schedulers") -> types.ModuleType:
    """A plugin module that offers one component."""
    module = types.ModuleType(f"module_of_{name}")

    def register(register: Any) -> None:
        register(name, component)

    register.__name__ = hook
    setattr(module, hook, hookimpl(register))
    return module


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Installs plugin modules from source: `installed(name, source)` gives an entry point to import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = itertools.count()

    def install(name: str, source: str) -> EntryPoint:
        module = f"turnout_test_plugin_{tmp_path.name.replace('-', '_')}_{next(names)}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        return EntryPoint(name, module, interfaces.ENTRY_POINTS)

    yield install
    for name in [m for m in sys.modules if m.startswith("turnout_test_plugin_")]:
        del sys.modules[name]


GOOD = """
    from dataclasses import dataclass
    from turnout.core import hookimpl

    @dataclass
    class Good:
        def schedule(self, waiting, running, draft): ...

    @hookimpl
    def register_schedulers(register):
        register("good", Good)
"""
BROKEN = {
    "ImportError": "import a_module_that_is_not_there",
    "SystemExit": "raise SystemExit(3)",
    "any exception": "raise RuntimeError('its own bug')",
    "a syntax error": "def broken(:",
    "an unknown hook": """
        from turnout.core import hookimpl

        @hookimpl
        def register_something_else(register): ...
    """,
    "a raising registration": """
        from dataclasses import dataclass
        from turnout.core import hookimpl

        @dataclass
        class Half:
            def schedule(self, waiting, running, draft): ...

        @hookimpl
        def register_schedulers(register):
            register("half", Half)
            raise RuntimeError("after the first")
    """,
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("order", ["a_first", "z_last"])
def test_a_broken_plugin_is_named_and_stops_nobody_else(installed: Any, fault: str, order: str) -> None:
    found = plugins.collect([installed("good", GOOD), installed(order, BROKEN[fault])])
    assert found.names("scheduler") == ["good"]
    (why,) = found.faults.values()
    assert f"plugin '{order}'" in why and f"TURNOUT_BLOCK={order}" in why
    with pytest.raises(PluginError, match="may be the one"):
        found.get("scheduler", "missing")
    found.get("scheduler", "good")


def test_a_half_done_registration_is_undone_and_says_why_when_asked_for(installed: Any) -> None:
    found = plugins.collect([installed("half", BROKEN["a raising registration"])])
    assert found.names("scheduler") == []
    with pytest.raises(PluginError, match="after the first.*TURNOUT_BLOCK=half"):
        found.get("scheduler", "half")


def test_an_unknown_name_lists_the_known_ones() -> None:
    found = plugins.collect([], {"good": offering("good", FCFS), "mine": offering("mine", Mine)})
    with pytest.raises(PluginError, match="scheduler=fcsf: there is no such choice. Installed here: good, mine"):
        found.get("scheduler", "fcsf")
    with pytest.raises(PluginError, match="no slot 'schedular'"):
        found.get("schedular", "fcfs")


def test_a_missing_method_is_named() -> None:
    @dataclass
    class Empty: ...

    found = plugins.collect([], {"empty": offering("empty", Empty)})
    with pytest.raises(PluginError, match="Empty lacks schedule"):
        found.get("scheduler", "empty")


def test_a_component_must_be_a_dataclass() -> None:
    class Plain:
        def schedule(self, waiting: Any, running: Any, draft: Any) -> None: ...

    found = plugins.collect([], {"plain": offering("plain", Plain)})
    with pytest.raises(PluginError, match="must be a dataclass"):
        found.get("scheduler", "plain")


@pytest.mark.parametrize(("contract", "good"), [(1, True), (0, False), (2, False), (-1, False), ("1", False)])
def test_this_contract_and_the_one_before_are_served_others_refused(contract: object, good: bool) -> None:
    @dataclass
    class Versioned(Mine):
        pass

    Versioned.contract = contract  # type: ignore[attr-defined]
    found = plugins.collect([], {"versioned": offering("versioned", Versioned)})
    if good:
        assert found.get("scheduler", "versioned").contract == contract
    else:
        with pytest.raises(PluginError, match=f"written for version {contract!r} of the scheduler contract"):
            found.get("scheduler", "versioned")


@pytest.mark.parametrize("names", list(itertools.permutations(["a", "b", "c"])))
def test_a_name_offered_twice_is_an_error_that_shows_both_and_later_plugins_still_load(names: tuple[str, ...]) -> None:
    offers = {
        "a": offering("same", Mine),
        "b": offering("same", FCFS),
        "c": offering("other", type("Other", (Mine,), {})),
    }
    found = plugins.collect([], {name: offers[name] for name in names})
    assert "other" in found.names("scheduler")
    with pytest.raises(
        PluginError,
        match="offered by two packages: .*plugin '[ab]'.*plugin '[ab]'.*Choose scheduler=[ab]:same or scheduler=[ab]:same",
    ):
        found.get("scheduler", "same")


def test_two_entry_points_of_one_name_are_two_plugins(installed: Any) -> None:
    found = plugins.collect([installed("twin", GOOD), installed("twin", GOOD.replace('"good"', '"better"'))])
    assert found.names("scheduler") == ["better", "good"] and not found.faults


def test_a_blocked_plugin_is_not_even_imported(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNOUT_BLOCK", "other, broken")
    found = plugins.collect([installed("good", GOOD), installed("broken", "raise RuntimeError")])
    assert found.names("scheduler") == ["good"] and not found.faults


def test_plugins_are_loaded_once_per_process(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = installed(
        "counted", "import builtins\nbuiltins.turnout_loads = getattr(builtins, 'turnout_loads', 0) + 1"
    )
    monkeypatch.setattr(plugins, "_loaded", None)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [counted])
    plugins.load()
    plugins.load()
    import builtins

    assert builtins.turnout_loads == 1  # type: ignore[attr-defined]
    del builtins.turnout_loads  # type: ignore[attr-defined]


def test_a_missing_library_is_told_without_importing_anything() -> None:
    @dataclass
    class Needy:
        capabilities: ClassVar[interfaces.Capabilities] = interfaces.Capabilities(needs=("a_kernel_library", "json"))

        def allocate(self, spec: Any, dtype: Any, device: Any) -> Any: ...
        def plan(self, batch: Any, layer: Any, block_size: Any) -> Any: ...
        def run(self, q: Any, k: Any, v: Any, cache: Any, plan: Any, sinks: Any) -> Any: ...

    found = plugins.collect([], {"needy": offering("needy", Needy, "register_attention")})
    assert found.get("attention", "needy").obstacles() == ["a_kernel_library is not installed"]


def test_the_hooks_of_plugins_run_in_the_declared_order_whatever_the_registration_order() -> None:
    for order in itertools.permutations(["first", "middle", "last"]):
        calls: list[str] = []
        made = {}
        for name in order:
            module = types.ModuleType(name)

            def step_finished(step: Any, seconds: float, name: str = name, calls: list[str] = calls) -> None:
                calls.append(name)

            flags = {"first": {"tryfirst": True}, "last": {"trylast": True}}.get(name, {})
            module.step_finished = hookimpl(step_finished, **flags)  # type: ignore[attr-defined]
            made[name] = module
        found = plugins.collect([], made)
        found.manager.hook.step_finished(step=None, seconds=0.0, report=None)
        assert calls == ["first", "middle", "last"]
