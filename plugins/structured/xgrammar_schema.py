"""Which schemas xgrammar enforces to the letter. The others are refused, for it would drop what it does not know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from turnout.plugins.structured.schema import NAMED, ONE, SEVERAL, Schema, parts

SAID = {  # by type, what is enforced
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "format"}),  # beside a length it lets control characters into a text,
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
FORMATS = frozenset({"uuid"})  # its dates have a 30 February, its IPv4 addresses leading zeros
UNREAD = re.compile(r"\(\?(=|!|<=|<!)|\\[bB1-9]")  # parts of an expression that it leaves out
STANDARD = frozenset({*ONE, *SEVERAL, *NAMED} - {"$defs", "definitions"}) | {
    "type", "enum", "const", "$ref", "$dynamicRef", "$anchor", "$dynamicAnchor", "required", "minProperties",
    "maxProperties", "dependencies", "dependentRequired", "minContains", "maxContains", "minItems", "maxItems",
    "uniqueItems", "pattern", "minLength", "maxLength", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
}  # fmt: skip
# keywords of the standard: one that is not enforced is refused, any other is a note


def refusal(schema: Schema, path: str = "") -> tuple[str, str] | None:
    """The path of a part that would not be enforced, and why."""
    if isinstance(schema, Mapping):
        said = {name for name in schema if name in STANDARD}
        if (why := _wrong(schema, said)) is not None:
            return path, f"structured=xgrammar does not enforce {why}; structured=llguidance may"
    for place, part in parts(schema, path):
        if (found := refusal(part, place)) is not None:
            return found
    return None


def _wrong(schema: Mapping[str, Any], said: set[str]) -> str | None:
    if not str(schema.get("$ref", "#")).startswith("#"):
        return f"a $ref to another document, {schema['$ref']!r}"
    for alone in ("$ref", "anyOf", "const", "enum"):
        if alone in said:
            others = sorted(said - {alone, "type"} if alone in ("const", "enum") else said - {alone})
            if others:
                return f"{others[0]} beside {alone}"
            return f"type beside {alone}" if "type" in said else None
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not kinds and said:
        return f"{min(said - {'type'})} without a type" if said - {"type"} else "an empty type"
    if not all(isinstance(kind, str) and kind in SAID for kind in kinds):
        return f"type {kinds!r}"
    strange = sorted(said - {"type"} - frozenset().union(*(SAID[kind] for kind in kinds)))
    if strange:
        return f"{strange[0]} with type {', '.join(kinds)}"
    if UNREAD.search(str(schema.get("pattern", ""))):
        return f"the pattern {schema['pattern']!r}"
    if {"pattern", "format"} <= said:
        return "pattern beside format"
    if "format" in said and (str(schema["format"]) not in FORMATS):
        return f"format {schema['format']!r}"
    missing = set(schema.get("required", ())) - set(schema.get("properties", {}))
    return f"a required property without a schema, {min(missing)!r}" if missing else None
