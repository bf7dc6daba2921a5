"""Arguments that a format writes one by one as text, as the pieces of a JSON object.

A parameter that is a string by the function's schema is passed on as it comes. Another is read whole: it becomes JSON
where its text is a value of a type the schema allows, and a string where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnout.core.parsers import Tool
from turnout.plugins.tool_parser.source import Broken, Reads, Source

KINDS: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
    list: ("array",),
    dict: ("object",),
    str: ("string",),
}
WORDS = {"True": True, "False": False, "None": None}  # as templates print Python's values


class Tagged:
    """The arguments of one call of `name`, which is announced."""

    def __init__(self, source: Source, name: str, tools: Sequence[Tool]) -> None:
        found = [tool["function"] for tool in tools if tool["function"]["name"] == name]
        self._schema: Mapping[str, Any] = (found[0].get("parameters") or {}) if found else {}
        self._source, self._keys = source, set[str]()

    def read(self, key: str, *ends: str) -> Reads[str]:
        """The text of one parameter up to one of `ends`. Raises Broken for one that was there."""
        if not key or key in self._keys:
            raise Broken
        source = self._source
        source.arguments(f"{', ' if self._keys else '{'}{_quoted(key)}: ")
        self._keys.add(key)
        kinds = self._kinds(key)
        if kinds == {"string"}:
            source.arguments('"')
            end = yield from source.pass_until(lambda text: source.arguments(_quoted(text)[1:-1]), *ends)
            source.arguments('"')
            return end
        text, end = yield from source.until(*ends)
        source.arguments(_typed(text, kinds))
        return end

    def close(self) -> None:
        """No parameter follows."""
        self._source.arguments("}" if self._keys else "{}")
        self._source.done()

    def _kinds(self, key: str) -> set[str]:
        """JSON types the schema allows; empty: it does not say."""
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return _kinds_of(schema, self._schema, 0)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _typed(text: str, kinds: set[str]) -> str:
    """JSON of what the text says."""
    plain = text.strip()
    try:
        value = WORDS[plain] if plain in WORDS else json.loads(plain)
        if not isinstance(value, str) and (not kinds or kinds.intersection(KINDS[type(value)])):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return _quoted(text)


def _kinds_of(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return {KINDS[type(value)][0] for value in values if type(value) in KINDS}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#/"):
        found: object = root
        for part in target[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return _kinds_of(found, root, depth + 1)
    options = [option for word in ("anyOf", "oneOf", "allOf") for option in schema.get(word) or []]
    return set().union(*(_kinds_of(option, root, depth + 1) for option in options))
