"""Whether a class keeps a contract: its members and what they can be called with. Looked at, never called."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Generic, Protocol


def members(protocol: type) -> dict[str, object]:
    """What a protocol asks for, with all it inherits: a function, a property, or None for data."""
    found: dict[str, object] = {}
    for base in reversed(protocol.__mro__):
        if base not in (object, Protocol, Generic):
            found |= dict.fromkeys(inspect.get_annotations(base)) | vars(base)
    return {name: member for name, member in found.items() if not name.startswith("_")}


def missing(component: type, protocol: type) -> list[str]:
    """Members that a dataclass lacks."""
    options = {spec.name for spec in dataclasses.fields(component)}
    return sorted(name for name in members(protocol) if name not in options and not hasattr(component, name))


def departures(component: type, protocol: type) -> Iterator[str]:
    """Each member of a dataclass that is there and can't be used as the contract does."""
    options = {spec.name for spec in dataclasses.fields(component)}
    for name, wanted in members(protocol).items():
        if name in options and callable(wanted):
            yield f"its option {name} hides the method {name} of the contract; give the option another name"
        elif wanted is not None and name not in options and hasattr(component, name):
            given = inspect.getattr_static(component, name)
            problem = (
                _is_no_value(given) if isinstance(wanted, property) else _uncallable(component, name, given, wanted)
            )
            if problem:
                yield f"{component.__qualname__}.{name}{problem}"


def _is_no_value(given: object) -> str | None:
    return " is a method, and is read like a value: make it a @property" if inspect.isroutine(given) else None


def _uncallable(component: type, name: str, given: object, wanted: object) -> str | None:
    """Why the engine can't call `given` as it would call `wanted`: by position, by name what is keyword-only there."""
    bound = isinstance(given, staticmethod | classmethod)
    if isinstance(given, property) or not callable(getattr(component, name)):
        return " must be a method"
    if isinstance(wanted, staticmethod | classmethod) and not bound:
        return " is called on the class: make it a @staticmethod"
    if inspect.iscoroutinefunction(getattr(component, name)) or inspect.isgeneratorfunction(getattr(component, name)):
        return " is called plainly: it can be neither async nor a generator"
    try:
        own = inspect.signature(getattr(component, name))
    except ValueError:  # of a builtin, which does not say
        return None
    asked = list(inspect.signature(getattr(wanted, "__func__", wanted)).parameters.values())  # type: ignore[arg-type]
    asked = asked if isinstance(wanted, staticmethod) else asked[1:]  # without self
    by_name = {spec.name: None for spec in asked if spec.kind is spec.KEYWORD_ONLY}
    by_place = [spec.name for spec in asked if spec.name not in by_name]
    try:
        own.bind(*([] if bound else ["self"]), *by_place, **by_name)
    except TypeError as error:
        call = ", ".join([*by_place, *(f"{key}=…" for key in by_name)])
        return f"{own} can't be called as {name}({call}), which the contract does: {error}"
    return None
