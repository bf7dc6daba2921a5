"""What can be chosen: a component of a slot, and whether it can be a choice at all. It knows no entry point."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, TypeGuard

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from turnout.compose.conformance import departures, members, missing
from turnout.core import hooks, interfaces, optional

ALL_SLOTS = hooks.SLOTS
SLOTS = {slot: offer for slot, offer in ALL_SLOTS.items() if slot != "format"}  # those the configuration chooses
OPTIONAL: Mapping[str, tuple[type, ...]] = {  # what a component may offer besides
    "attention": (optional.RefreshingPlans, optional.RefusingBackend),
    "blocks": (optional.SharingBlocks,),
    "quant": (optional.PreparedQuantizer, optional.StackCheck, optional.PackedQuantizer),
    "runner": (optional.AsyncRunner,),
    "format": (optional.PackedFormat,),
}
FOR_ANY = (optional.MachineCheck, optional.NamedKernels)
RESERVED = {"defaults", "contract", "hydra"}  # names that mean something else where an option would stand
REQUIRED = "???"  # the default of an option that has none, as OmegaConf writes it


@dataclasses.dataclass(frozen=True)
class Choice:
    """One component that can be chosen: `slot=name`."""

    slot: str
    name: str  # PACKAGE:NAME where the plain name is somebody else's
    component: type
    package: str  # distribution
    version: str
    plugin: str  # entry point

    @property
    def options(self) -> list[tuple[str, str, object]]:
        """(name, type, default) of every option; `REQUIRED` is the default of one that has none."""
        found = []
        for spec in dataclasses.fields(self.component):
            default: object = REQUIRED if spec.default is dataclasses.MISSING else spec.default
            if spec.default_factory is not dataclasses.MISSING:
                default = spec.default_factory()
            kind = spec.type.__name__ if type(spec.type) is type else str(spec.type)
            found.append((spec.name, kind, default))
        return found

    @property
    def contract(self) -> int:
        return self.component.contract if _versioned(self.component) else hooks.CONTRACTS[self.slot]

    def obstacles(self) -> list[str]:
        """Why the component can't be had here: modules that are not installed, and what its own `obstacle` says
        (`optional.MachineCheck`). Builds nothing, and imports nothing but the package a needed module is in."""
        needs = self.component.capabilities.needs if _is_backend(self.component) else ()
        found = [f"{name} is not installed" for name in needs if not installed(name)]
        try:
            why = self.component.obstacle() if isinstance(self.component, optional.MachineCheck) else None
        except Exception as error:  # noqa: BLE001  a stranger's code: it is one obstacle more
            why = f"its obstacle() fails: {type(error).__name__}: {error}"
        return found + ([why] if why else [])

    @property
    def devices(self) -> frozenset[str] | None:
        """Device types an attention backend runs on; None: any."""
        return self.component.capabilities.devices if _is_backend(self.component) else None


class _Versioned:
    contract: ClassVar[int]


class _Backend:
    capabilities: ClassVar[interfaces.Capabilities]


def _versioned(component: type) -> TypeGuard[type[_Versioned]]:
    return isinstance(component, optional.Versioned)


def _is_backend(component: type) -> TypeGuard[type[_Backend]]:
    return isinstance(getattr(component, "capabilities", None), interfaces.Capabilities)


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the package it would be in is not there, or is no package
        return False


def problem(slot: str, name: object, component: object) -> str | None:
    """Why this can't be a choice of the slot; None: it can. Never raises, whatever the component is."""
    try:
        return next(_problems(slot, name, component), None)
    except Exception as error:  # noqa: BLE001  a stranger's metaclass, default or descriptor
        return f"it can't be looked at: {type(error).__name__}: {error}"


def _problems(slot: str, name: object, component: object) -> Iterator[str]:
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name)):
        yield f"{name!r} is no name for a choice: use letters, digits, _ and -"
    if not isinstance(component, type):
        if dataclasses.is_dataclass(component):
            yield f"{component!r} is an object; register its class, {type(component).__qualname__}"
        yield f"{component!r} must be a class, a dataclass whose fields are its options"
        return
    if not dataclasses.is_dataclass(component):
        yield f"{component!r} must be a dataclass, since its fields are its options"
        return
    title, options = component.__qualname__, {spec.name for spec in dataclasses.fields(component)}
    own = {key for key, kind in vars(component).get("__annotations__", {}).items() if "ClassVar" not in str(kind)}
    if lost := sorted(own - options):
        yield f"{title} is not decorated with @dataclass, so {', '.join(lost)} are no options of it"
    for option in sorted(options):
        if option in RESERVED or option.startswith("_"):
            yield f"an option can't be called {option}; give it another name"
        if any(callable(vars(base).get(option)) for base in component.__mro__[1:]):
            yield f"its option {option} hides the method {option} it inherits; give the option another name"
    yield from _breaches(slot, component)
    try:
        OmegaConf.structured(component)
    except OmegaConfBaseException as error:
        yield f"the configuration can't hold its option {error.full_key}: {str(error).splitlines()[0]}"


def _breaches(slot: str, component: type) -> Iterator[str]:
    """What the contract asks for and the component does not keep."""
    current, title = hooks.CONTRACTS[slot], component.__qualname__
    spoken = sorted({current, max(current - 1, 1)}, reverse=True)
    if _versioned(component) and component.contract not in spoken:
        known = " and ".join(map(str, spoken))
        yield f"it was written for version {component.contract!r} of the {slot} contract; this turnout speaks {known}"
    if component is interfaces.Auto:
        return  # stands for another choice
    protocol = ALL_SLOTS[slot][1]
    if absent := missing(component, protocol):
        yield f"{title} lacks {', '.join(absent)}, which the {slot} contract asks for"
    yield from departures(component, protocol)
    for extra in (*OPTIONAL.get(slot, ()), *FOR_ANY):
        there = set(members(extra)) - set(absent := missing(component, extra))
        if len(there) > 1 and (absent := [name for name in absent if members(extra)[name] is not None]):
            yield f"{title} has {', '.join(sorted(there))} of {extra.__name__}, and lacks {', '.join(absent)}"
        if not absent or len(there) > 1:
            yield from departures(component, extra)
    if slot == "attention" and not _is_backend(component):
        yield f"{title}.capabilities must be a Capabilities"
    if slot == "quant" and not isinstance(component.checkpoint_formats, frozenset | set):  # type: ignore[attr-defined]
        yield f"{title}.checkpoint_formats must be a frozenset of names"
