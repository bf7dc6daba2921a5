"""Finds plugins, checks them, and makes their components choices of the configuration.

A plugin nobody asked for never stops the others: what went wrong with it is kept, shown by `turnout plugins`, and
raised only when one of its choices is asked for. Nothing is half registered: a plugin's offers count when all of its
registering is done. Turnout's own come first, so their names are theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigStore

from turnout.compose.choices import ALL_SLOTS, SLOTS, Choice, installed, problem
from turnout.core import hooks, interfaces
from turnout.core.model import Format

OWN = "turnout"  # our distribution
AUTOMATIC = ("attention", "quant", "tool_parser", "reasoning_parser", "structured")  # slots that have `auto`
FILES = "TURNOUT_PLUGIN"  # environment: plugin files, as in PATH
PATIENCE = 30.0  # seconds for a stranger's import, and for its registering; TURNOUT_IMPORT_SECONDS says otherwise


class PluginError(Exception):
    """A plugin cannot be used. The message names the package and the remedy."""


@dataclass
class Source:
    """One entry point, and what came of it."""

    plugin: str
    package: str
    version: str = "?"
    seconds: float = 0.0  # to import and register it
    blocked: bool = False  # by TURNOUT_BLOCK

    @property
    def prefix(self) -> str:
        """What stands before a choice's name where that alone is not exact: the package, if it is one."""
        return self.plugin if self.version == "?" else self.package

    @property
    def exact(self) -> str:
        """A name for TURNOUT_BLOCK that means nothing else."""
        return self.plugin if self.version == "?" else f"{self.package}:{self.plugin}"

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} of {self.package} {self.version}".removesuffix(" ?")


class _Offer(NamedTuple):
    slot: str
    name: str
    component: type
    replaces: str | None


@dataclass
class Plugins:
    """Every plugin found, every choice they offer, and what went wrong."""

    manager: hooks.Hooks
    choices: dict[tuple[str, str], Choice] = field(default_factory=dict)
    exact: dict[tuple[str, str], Choice] = field(default_factory=dict)  # by PACKAGE:NAME
    faults: dict[str, str] = field(default_factory=dict)  # plugin, or plugin:slot=name -> why it cannot be used
    claimed: dict[tuple[str, str], str] = field(default_factory=dict)  # (slot, name) -> why that choice is not usable
    contested: set[tuple[str, str]] = field(default_factory=set)  # offered by two packages
    presets: list[str] = field(default_factory=list)  # packages with YAML
    sources: list[Source] = field(default_factory=list)

    def names(self, slot: str) -> list[str]:
        return sorted(name for s, name in self.choices if s == slot)

    def get(self, slot: str, name: str) -> Choice:
        """By its name, or exactly: PACKAGE:NAME. Raises PluginError when there is no such choice, or its plugin is broken."""
        if slot not in ALL_SLOTS:
            raise PluginError(f"there is no slot {slot!r}; the slots are {', '.join(ALL_SLOTS)}")
        if (slot, name) in self.claimed:
            raise PluginError(self.claimed[slot, name])
        choice = self.choices.get((slot, name)) or self.exact.get((slot, name))
        if choice is None:
            broken = "".join(
                f"\nA plugin could not be loaded and may be the one: {why}" for why in self.faults.values()
            )
            raise PluginError(
                f"{slot}={name}: there is no such choice. Installed here: {', '.join(self.names(slot))}. "
                f"`turnout plugins` lists all of them; a missing one comes with its package.{broken}"
            )
        return choice

    def formats(self) -> dict[str, Format]:
        """The readers of model files, by suffix."""
        return {name: self.choices["format", name].component() for name in self.names("format")}

    def describe(self, slots: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Name, package and version of the chosen plugins."""
        chosen = {slot: self.get(slot, name) for slot, name in slots.items()}
        return {slot: {"name": c.name, "package": c.package, "version": c.version} for slot, c in chosen.items()}


_loaded: Plugins | None = None


def load() -> Plugins:
    """Every installed plugin, less those named in TURNOUT_BLOCK (comma-separated): by their entry point, their package, or
    PACKAGE:ENTRY_POINT. Loaded once per process."""
    global _loaded
    if _loaded is None:
        files = map(Path, filter(None, os.environ.get(FILES, "").split(os.pathsep)))
        _loaded = collect(entry_points(group=interfaces.ENTRY_POINTS), files=files)
    return _loaded


def collect(
    entries: Iterable[EntryPoint], extra: Mapping[str, object] | None = None, files: Iterable[Path] = ()
) -> Plugins:
    """Load `entries`, ours first, then in order of name; then register the modules of `extra`, and those in `files`."""
    found = Plugins(hooks.new_hooks())
    core = Source("core", OWN, version(OWN))
    _take(found, core, [_Offer(slot, "auto", interfaces.Auto, None) for slot in AUTOMATIC])
    blocked = {name.strip() for name in os.environ.get("TURNOUT_BLOCK", "").split(",")}
    known: set[str] = set()
    for entry in sorted(entries, key=lambda e: (e.dist is None or e.dist.name != OWN, e.name, e.value)):
        dist = entry.dist
        source = Source(entry.name, dist.name, dist.version) if dist else Source(entry.name, entry.value)
        if f"{source.exact} {entry.value}" not in known:  # a distribution may be found twice
            known.add(f"{source.exact} {entry.value}")
            source.blocked = not blocked.isdisjoint({source.plugin, source.package, source.exact})
            _register(found, source, entry.load)
    for name, module in (extra or {}).items():
        _register(found, Source(name, getattr(module, "__name__", name)), partial(lambda m: m, module))
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]  # its version: another text is another plugin
        _register(found, Source(file.stem, file.stem, digest), partial(_run_file, file))
    return found


def _run_file(file: Path) -> object:
    """The module a plugin file makes; in `sys.modules`, where dataclasses look for their annotations."""
    spec = importlib.util.spec_from_file_location(f"turnout_plugin_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _register(found: Plugins, source: Source, get: Callable[[], object]) -> None:
    """Take one plugin in whole, or note why not."""
    found.sources.append(source)
    if source.blocked:
        return
    offers: list[_Offer] = []
    presets: list[str] = []
    began, label = time.monotonic(), f"{source.package}:{source.plugin}"
    try:
        plugin = _bounded(get, source)
        found.manager.register(plugin, name=label)
        found.manager.check_pending()
        _check_marks(found.manager, plugin)
        _bounded(partial(_ask, found, plugin, offers, presets), source)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a stranger's module does at import
        if found.manager.has_plugin(label):
            found.manager.unregister(name=label)
        remedy = f"Upgrade or uninstall {source.package}; TURNOUT_BLOCK={source.exact} skips it."
        why = f"{source} failed to load: {type(error).__name__}: {error}. {remedy}"
        found.faults[source.exact] = why
        for offer in offers:
            if (offer.slot, offer.name) not in found.choices:
                found.claimed.setdefault((offer.slot, offer.name), why)
        return
    finally:
        source.seconds = time.monotonic() - began
    found.presets += presets
    _take(found, source, offers)


def _bounded(call: Callable[[], Any], source: Source) -> Any:
    """What `call` returns. A stranger's has a thread and a time of its own: one that sleeps or loops is left behind."""
    if source.package == OWN:
        return call()
    result: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001  handed on
            failed.append(error)

    limit = float(os.environ.get("TURNOUT_IMPORT_SECONDS", PATIENCE))
    thread = threading.Thread(target=run, name=f"import of {source.plugin}", daemon=True)
    with contextlib.redirect_stdout(sys.stderr):  # what it prints is no output of a command
        thread.start()
        thread.join(limit)
    if failed:
        error = failed[0]
        raise error if isinstance(error, Exception | SystemExit) else RuntimeError(f"it raised {type(error).__name__}")
    if not result:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise TimeoutError(f"its import was not done after {limit:g} s (TURNOUT_IMPORT_SECONDS allows more)")
    return result[0]


def _check_marks(manager: hooks.Hooks, plugin: object) -> None:
    """Raise TypeError for a function that is called like a hook and is not marked as one: it would never be called."""
    for name in vars(manager.hook):
        own = vars(plugin).get(name) if hasattr(plugin, "__dict__") else None
        if callable(own) and not hasattr(own, "turnout_impl"):
            raise TypeError(f"{name} is not marked with @hookimpl, so nobody would call it")


def _ask(found: Plugins, plugin: object, offers: list[_Offer], presets: list[str]) -> bool:
    """Call the plugin's registering hooks."""
    for slot, (hook, _) in ALL_SLOTS.items():
        for impl in getattr(found.manager.hook, hook).get_hookimpls():
            if impl.plugin is plugin:
                impl.function(**{argument: partial(_note, offers, slot) for argument in impl.argnames})
    for impl in found.manager.hook.register_presets.get_hookimpls():
        if impl.plugin is plugin:
            impl.function(**{argument: presets.append for argument in impl.argnames})
    for package in presets:
        if not installed(package):
            raise ModuleNotFoundError(f"register_presets names {package!r}, and there is no such package")
    return True


def _note(offers: list[_Offer], slot: str, name: str, component: type, /, *, replaces: str | None = None) -> None:
    offers.append(_Offer(slot, name, component, replaces))


def _take(found: Plugins, source: Source, offers: Iterable[_Offer]) -> None:
    """Make each component a choice, or note why it is not usable."""
    for slot, name, component, replaces in offers:
        label = f"{source.exact}:{slot}={name}"
        why = problem(slot, name, component) or _twice(found, slot, component)
        if why:
            found.faults[label] = f"{slot}={name} of {source} is not usable: {why}"
            if isinstance(name, str) and (slot, name) not in found.choices:
                found.claimed[slot, name] = found.faults[label]
            continue
        choice = Choice(slot, name, component, source.package, source.version, source.plugin)
        exact = f"{source.prefix}:{name}"
        if (other := found.choices.get((slot, name))) is None and (slot, name) not in found.contested:
            found.choices[slot, name] = choice
            found.claimed.pop((slot, name), None)  # by one that is broken
            _store(choice)
        else:
            choice = found.choices[slot, exact] = replace(choice, name=exact)
            if other is not None and other.package == OWN:
                if replaces != name:
                    found.faults[label] = (
                        f"{slot}={name} is Turnout's own; that of {source} is chosen as {slot}={exact}. Its author may call "
                        f"it otherwise, or say so: register({name!r}, …, replaces={name!r})"
                    )
            else:
                _both(found, slot, name, other, choice, label)
        found.exact[slot, exact] = choice
        _store(replace(choice, name=exact))


def _twice(found: Plugins, slot: str, component: type) -> str | None:
    same = (c for c in found.choices.values() if c.slot == slot and c.component is component)
    known = next(same, None) if component is not interfaces.Auto else None
    return None if known is None else f"{component.__qualname__} is {slot}={known.name} already; make a subclass of it"


def _both(found: Plugins, slot: str, name: str, first: Choice | None, second: Choice, label: str) -> None:
    """Two packages offer one name: neither has it, each can be named exactly."""
    if first is not None:
        del found.choices[slot, name]
        exact = next(key[1] for key, choice in found.exact.items() if choice is first)
        found.choices[slot, exact] = found.exact[slot, exact] = replace(first, name=exact)
        found.contested.add((slot, name))
        found.claimed[slot, name] = (
            f"{slot}={name} is offered by two packages: {first.package} {first.version} (plugin {first.plugin!r}) and "
            f"{second.package} {second.version} (plugin {second.plugin!r}). Choose {slot}={exact} or {slot}={second.name}"
        )
    found.faults[label] = found.claimed[slot, name]


def _store(choice: Choice) -> None:
    ConfigStore.instance().store(choice.name, choice.component, group=choice.slot, provider=choice.package)


def versions() -> dict[str, str]:
    """Versions that can change an answer."""
    found = {"python": platform.python_version()}
    for name in (OWN, "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):  # a runner and a loader may do without transformers
            found[name] = version(name)
    return found


def options_of(component: object) -> dict[str, Any]:
    """A component's options as plain values."""
    assert is_dataclass(component) and not isinstance(component, type)
    return {spec.name: getattr(component, spec.name) for spec in fields(component)}


__all__ = ["SLOTS", "Choice", "PluginError", "Plugins", "Source", "collect", "load", "options_of", "versions"]
