"""JSON schemas as data: their parts, and which part is at fault. It knows no grammar library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

ONE = (
    *("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DEEPEST = 100  # levels: deeper ones are refused

Schema = Mapping[str, Any] | bool


def read(text: str) -> dict[str, Any]:
    """A schema as an object; `true` becomes {}. Raises ValueError for what is no schema."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not valid JSON: {error}") from None
    if found is True:
        return {}
    if not isinstance(found, dict):
        raise ValueError("the schema must be an object, and one that some answer can match")  # noqa: TRY004
    if _depth(found) > DEEPEST:
        raise ValueError(f"the schema is nested more than {DEEPEST} levels deep")
    return found


def choices(text: str) -> list[str]:
    """The texts of a choice. Raises ValueError for what is no list of texts."""
    found = json.loads(text)
    if not (isinstance(found, list) and found and all(isinstance(each, str) and each for each in found)):
        raise ValueError("a choice must be a list of texts that are not empty")
    return found


def _depth(schema: Any) -> int:
    level, depth = [schema], 0
    while level and depth <= DEEPEST * 2:
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x if isinstance(x, list) else ())]
        depth += 1
    return depth // 2  # a keyword and its schema count once


def parts(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """The schemas directly inside one, each with its JSON pointer."""
    if not isinstance(schema, Mapping):
        return
    for name in ONE:
        if isinstance(schema.get(name), Mapping | bool):
            yield f"{path}/{name}", schema[name]
    for name in SEVERAL:
        if isinstance(schema.get(name), list):
            yield from ((f"{path}/{name}/{place}", part) for place, part in enumerate(schema[name]))
    for name in NAMED:
        if isinstance(schema.get(name), Mapping):
            yield from ((f"{path}/{name}/{_escaped(key)}", part) for key, part in schema[name].items())


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def changed(schema: Schema, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy of a schema, each part of it changed; the innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    copy = dict(schema)
    for name in ONE:
        if isinstance(copy.get(name), Mapping):
            copy[name] = changed(copy[name], change)
    for name in SEVERAL:
        if isinstance(copy.get(name), list):
            copy[name] = [changed(part, change) for part in copy[name]]
    for name in NAMED:
        if isinstance(copy.get(name), Mapping):
            copy[name] = {key: changed(part, change) for key, part in copy[name].items()}
    change(copy)
    return copy


def fault(root: Mapping[str, Any], fails: Callable[[Mapping[str, Any]], str]) -> tuple[str, str] | None:
    """Where a schema is at fault, and why: the deepest part that fails by itself for the same reason as the whole.

    `fails` says why a schema can't be served, or "". None: this one can.
    """
    why = fails(root)
    if not why:
        return None
    definitions = {name: root[name] for name in ("$schema", "$defs", "definitions") if name in root}
    place, schema, looking = "", root, True
    while looking:
        looking = False
        for below, part in parts(schema, place):
            if isinstance(part, Mapping) and fails({**definitions, **part}) == why:
                place, schema, looking = (
                    below,
                    part,
                    not below.startswith(("/$defs/", "/definitions/")) or below != place,
                )
                break
    return place, why
