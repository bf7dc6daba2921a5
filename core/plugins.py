"""Finds plugins, checks them, and makes their components choices of the configuration.

A plugin nobody asked for never stops the others: what went wrong with it is kept, shown by `turnout plugins`, and
raised only when one of its choices is asked for. Nothing is half registered: a plugin's offers count when all of its
registering is done.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from turnout.core import hooks, interfaces

SLOTS: Mapping[str, tuple[str, type]] = {  # slot -> (registering hook, protocol)
    "loader": ("register_loaders", interfaces.ModelLoader),
    "attention": ("register_attention", interfaces.AttentionBackend),
    "scheduler": ("register_schedulers", interfaces.Scheduler),
    "preemption": ("register_preemptions", interfaces.Preemption),
    "blocks": ("register_block_managers", interfaces.BlockManager),
    "quant": ("register_quantizers", interfaces.Quantizer),
    "runner": ("register_runners", interfaces.ModelRunner),
}


class PluginError(Exception):
    """A plugin cannot be used. The message names the package and the remedy."""


@dataclass(frozen=True)
class Choice:
    """One component that can be chosen: `slot=name`."""

    slot: str
    name: str
    component: type
    package: str  # distribution
    version: str
    plugin: str  # entry point

    @property
    def options(self) -> list[tuple[str, str, object]]:
        """(name, type, default) of every option."""
        found = []
        for spec in dataclasses.fields(self.component):
            default: object = spec.default
            if spec.default_factory is not dataclasses.MISSING:
                default = spec.default_factory()
            found.append((spec.name, spec.type if isinstance(spec.type, str) else spec.type.__name__, default))
        return found

    @property
    def contract(self) -> int:
        return int(getattr(self.component, "contract", interfaces.CONTRACTS[self.slot]))

    def obstacles(self) -> list[str]:
        """Why the component can't be had here: modules that are not installed, and what its own optional
        `obstacle() -> str | None` says. Builds nothing, and imports nothing but the package a needed module is in."""
        needs = getattr(getattr(self.component, "capabilities", None), "needs", ())
        found = [f"{name} is not installed" for name in needs if not _installed(name)]
        own = getattr(self.component, "obstacle", None)
        try:
            why = own() if own is not None else None
        except Exception as error:  # noqa: BLE001  a stranger's code: it is one obstacle more
            why = f"its obstacle() fails: {type(error).__name__}: {error}"
        return found + ([why] if why else [])


@dataclass
class Plugins:
    """Every plugin found, every choice they offer, and what went wrong."""

    manager: hooks.Hooks
    choices: dict[tuple[str, str], Choice] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)  # plugin -> why it cannot be used
    claimed: dict[tuple[str, str], str] = field(default_factory=dict)  # (slot, name) -> why that choice is not usable
    presets: list[str] = field(default_factory=list)  # packages with YAML

    def names(self, slot: str) -> list[str]:
        return sorted(name for s, name in self.choices if s == slot)

    def get(self, slot: str, name: str) -> Choice:
        """Raises PluginError when there is no such choice, or its plugin is broken."""
        if slot not in SLOTS:
            raise PluginError(f"there is no slot {slot!r}; the slots are {', '.join(SLOTS)}")
        if (slot, name) in self.claimed:
            raise PluginError(self.claimed[slot, name])
        if (slot, name) not in self.choices:
            broken = "".join(
                f"\nA plugin could not be loaded and may be the one: {why}" for why in self.faults.values()
            )
            raise PluginError(
                f"{slot}={name}: there is no such choice. Installed here: {', '.join(self.names(slot))}. "
                f"`turnout plugins` lists all of them; a missing one comes with its package.{broken}"
            )
        return self.choices[slot, name]

    def describe(self, slots: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Name, package and version of the chosen plugins."""
        chosen = {slot: self.get(slot, name) for slot, name in slots.items()}
        return {slot: {"name": c.name, "package": c.package, "version": c.version} for slot, c in chosen.items()}


_loaded: Plugins | None = None


def load() -> Plugins:
    """Every installed plugin, less those named in TURNOUT_BLOCK (comma-separated). Loaded once per process."""
    global _loaded
    if _loaded is None:
        _loaded = collect(entry_points(group=interfaces.ENTRY_POINTS))
    return _loaded


def collect(entries: Iterable[EntryPoint], extra: Mapping[str, object] | None = None) -> Plugins:
    """Load `entries` in order of name, then register the modules of `extra`."""
    found = Plugins(hooks.new_hooks())
    own = _Source("core", "turnout", version("turnout"))
    _offer(found, own, [(slot, "auto", interfaces.Auto) for slot in ("attention", "quant")])
    blocked = {name.strip() for name in os.environ.get("TURNOUT_BLOCK", "").split(",")}
    seen: dict[str, str] = {}
    for entry in sorted(entries, key=lambda e: (e.name, e.value)):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        if entry.name in blocked or seen.get(entry.name) == package:
            continue
        if entry.name in seen:
            found.faults[f"{entry.name} of {package}"] = (
                f"two packages name a plugin {entry.name!r}: {seen[entry.name]} and {package}; the first is used. "
                f"Uninstall one, or TURNOUT_BLOCK={entry.name} skips both."
            )
            continue
        seen[entry.name] = package
        source = _Source(entry.name, *(package.rpartition(" ")[::2] if entry.dist else (package, "?")))
        _register(found, source, entry.load)
    for name, module in (extra or {}).items():
        _register(found, _Source(name, getattr(module, "__name__", name), "?"), partial(lambda m: m, module))
    return found


@dataclass(frozen=True)
class _Source:
    plugin: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} of {self.package} {self.version}".removesuffix(" ?")


def _register(found: Plugins, source: _Source, get: Callable[[], object]) -> None:
    """Take one plugin in whole, or note why not."""
    remedy = f"Upgrade or uninstall {source.package}; TURNOUT_BLOCK={source.plugin} skips it."
    offers: list[tuple[str, str, type]] = []
    presets: list[str] = []
    try:
        plugin = get()
        found.manager.register(plugin, name=source.plugin)
        found.manager.check_pending()
        for slot, (hook, _) in SLOTS.items():
            for impl in getattr(found.manager.hook, hook).get_hookimpls():
                if impl.plugin is plugin:
                    impl.function(**{a: partial(_collect, offers, slot) for a in impl.argnames})
        for impl in found.manager.hook.register_presets.get_hookimpls():
            if impl.plugin is plugin:
                impl.function(**{a: presets.append for a in impl.argnames})
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a stranger's module does at import
        found.faults[source.plugin] = f"{source} failed to load: {type(error).__name__}: {error}. {remedy}"
        for slot, name, _ in offers:
            found.claimed.setdefault((slot, name), found.faults[source.plugin])
        if found.manager.has_plugin(source.plugin):
            found.manager.unregister(name=source.plugin)
        return
    found.presets += presets
    _offer(found, source, offers)


def _collect(offers: list[tuple[str, str, type]], slot: str, name: str, component: type) -> None:
    offers.append((slot, name, component))


def _offer(found: Plugins, source: _Source, offers: Iterable[tuple[str, str, type]]) -> None:
    """Make each component a choice, or note why it is not usable."""
    for slot, name, component in offers:
        problem = _problem(slot, name, component)
        choice = Choice(slot, name, component, source.package, source.version, source.plugin)
        if problem:
            found.claimed[slot, name] = f"{slot}={name} of {source} is not usable: {problem}"
            found.faults.setdefault(source.plugin, found.claimed[slot, name])
        elif (slot, name) in found.choices:
            other = found.choices[slot, name]
            message = (
                f"{slot}={name} is offered by two packages: {other.package} {other.version} (plugin {other.plugin!r}) "
                f"and {source.package} {source.version} (plugin {source.plugin!r}). Uninstall one of them, or set "
                f"TURNOUT_BLOCK={source.plugin} to skip the second."
            )
            found.claimed[slot, name] = message
            found.faults[f"{source.plugin}:{slot}={name}"] = message
        else:
            found.choices[slot, name] = choice
            ConfigStore.instance().store(group=slot, name=name, node=component, provider=source.package)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the package it would be in is not there, or is no package
        return False


def _problem(slot: str, name: str, component: type) -> str | None:
    """Why `component` does not satisfy its slot's contract, or can't be a choice of the configuration."""
    current = interfaces.CONTRACTS[slot]
    if not (isinstance(name, str) and re.fullmatch(r"[\w-]+", name)):
        return f"{name!r} is no name for a choice: use letters, digits, _ and -"
    if not isinstance(component, type) or not dataclasses.is_dataclass(component):
        return f"{component!r} must be a dataclass, since its fields are its options"
    wanted = getattr(component, "contract", current)
    if wanted not in (current, current - 1):
        return f"it was written for version {wanted} of the {slot} contract; this turnout speaks {current} and {current - 1}"
    if component is interfaces.Auto:
        return None  # stands for another choice
    protocol = SLOTS[slot][1]
    members = {m for m in (*vars(protocol), *getattr(protocol, "__annotations__", {})) if not m.startswith("_")}
    fields = {f.name for f in dataclasses.fields(component)}
    missing = sorted(members - set(dir(component)) - fields)
    if missing:
        return f"{component.__qualname__} lacks {', '.join(missing)}, which the {slot} contract asks for"
    if slot == "attention" and not isinstance(component.capabilities, interfaces.Capabilities):  # type: ignore[attr-defined]
        return f"{component.__qualname__}.capabilities must be a Capabilities"
    try:
        OmegaConf.structured(component)
    except OmegaConfBaseException as error:
        return f"the configuration can't hold its option {error.full_key}: {str(error).splitlines()[0]}"
    return None


def versions() -> dict[str, str]:
    """Versions that can change an answer."""
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("turnout", "torch", "transformers")
    }


def options_of(component: object) -> dict[str, Any]:
    """A component's options as plain values."""
    assert dataclasses.is_dataclass(component) and not isinstance(component, type)
    return {spec.name: getattr(component, spec.name) for spec in dataclasses.fields(component)}
