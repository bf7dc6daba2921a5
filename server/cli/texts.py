"""Overrides whose value is a text: it stays as it was typed, whatever a number, a list or a variable looks like to Hydra.

model=3.10   server.api_key=12e4567   system='use ${x}'   sampling.stop=[1e5, no]
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from turnout.compose.plugins import Plugins

TEXT = ("str", "str | None")
TEXTS = "list[str]"
QUOTED = re.compile(r"'.*'|\".*\"", re.DOTALL)  # for Hydra already, by whoever knows it


def as_typed(key: str, value: str, found: Plugins) -> str | None:
    """The value as Hydra should see it where the key takes a text or a list of them; None: it takes something else."""
    kinds = set(_kinds(key.split("."), found))
    if kinds & {*TEXT}:
        if QUOTED.fullmatch(value) or (value == "null" and "str | None" in kinds) or _is_itself(value):
            return value
        return quoted(value)
    if TEXTS in kinds and (items := re.fullmatch(r"\[([^\[\]{}'\"\\]*)\]", value)):
        texts = [item.strip() for item in items[1].split(",")] if items[1].strip() else []
        return f"[{','.join(map(quoted, texts))}]"
    return None


def _is_itself(value: str) -> bool:
    """Whether Hydra takes it for the text it is."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        found = OverridesParser.create().parse_override(f"key={value}").value()
    except HydraException:
        return False
    return isinstance(found, str) and found == value and "${" not in value


def quoted(value: str) -> str:
    """`value` as a quoted string of Hydra's override grammar that stands for itself, with no variable in it."""
    plain = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), plain) + "'"


def _kinds(path: list[str], found: Plugins) -> Iterator[str]:
    """The types that a key has, as its dataclasses write them: one for each command and choice that has it."""
    from turnout.server.config import ChatConfig, GenerateConfig, ServeConfig

    if len(path) == 2:
        for choice in found.choices.values():
            if choice.slot == path[0]:
                yield from _of(choice.component, path[1:])
    for kind in (ServeConfig, GenerateConfig, ChatConfig):
        yield from _of(kind, path)


def _of(kind: type, path: list[str]) -> Iterator[str]:
    for spec in dataclasses.fields(kind):
        if spec.name == path[0]:
            inner = spec.default_factory
            if len(path) == 1:
                yield str(spec.type)
            elif isinstance(inner, type) and dataclasses.is_dataclass(inner):
                yield from _of(inner, path[1:])
