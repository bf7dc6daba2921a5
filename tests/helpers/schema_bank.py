"""JSON schemas of many kinds: some as tools, extraction jobs and configuration files have them, the rest by chance."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NUM_GENERATED = 160


def _object(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return closed | {"required": list(properties) if required is None else required} | more


TEXT: Schema = {"type": "string"}
SHORT: Schema = {"type": "string", "maxLength": 12}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}


def _array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items} | more


WRITTEN: dict[str, Schema] = {
    "any": {},
    "any object": {"type": "object"},
    "text": TEXT,
    "integer": INTEGER,
    "number": NUMBER,
    "flag": FLAG,
    "null": {"type": "null"},
    "either": {"type": ["string", "null"]},
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1]}, "é\"\\"]},
    "const": {"const": {"version": 2, "tags": ["a", "b"]}},
    "empty object": _object({}),
    "weather": _object({"location": SHORT, "unit": {"enum": ["celsius", "fahrenheit"]}}, ["location"]),
    "search": _object({"query": SHORT, "limit": {"type": "integer", "minimum": 1, "maximum": 50}, "exact": FLAG}, ["query"]),
    "person": _object({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "email": {"type": "string", "format": "email"}}),
    "calendar": _object({"title": SHORT, "date": {"type": "string", "format": "date"}, "start": {"type": "string", "format": "date-time"}, "guests": _array(SHORT, maxItems=3)}, ["title", "date"]),
    "identifier": _object({"id": {"type": "string", "format": "uuid"}, "address": {"type": "string", "format": "ipv4"}}),
    "time": {"type": "string", "format": "time"},
    "invoice": _object({
        "number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
        "lines": _array(_object({"item": SHORT, "count": {"type": "integer", "minimum": 1}, "price": {"type": "number", "minimum": 0}}), minItems=1, maxItems=3),
        "total": {"type": "number", "exclusiveMinimum": 0},
        "currency": {"enum": ["EUR", "USD"]},
    }),
    "linked list": {"$ref": "#/$defs/node", "$defs": {"node": _object({"value": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})}},
    "tree": _object({"name": SHORT, "children": _array({"$ref": "#"}, maxItems=2)}),
    "steps": _object({"steps": _array(_object({"explanation": SHORT, "output": SHORT}), maxItems=3), "final_answer": SHORT}),
    "tool call": {"anyOf": [
        _object({"name": {"const": "add"}, "arguments": _object({"a": INTEGER, "b": INTEGER})}),
        _object({"name": {"const": "say"}, "arguments": _object({"text": SHORT})}),
    ]},
    "discriminated": {"oneOf": [_object({"kind": {"const": "cat"}, "lives": INTEGER}), _object({"kind": {"const": "dog"}, "good": FLAG})]},
    "disjoint types": {"oneOf": [INTEGER, TEXT, {"type": "null"}]},
    "overlapping": {"oneOf": [INTEGER, NUMBER]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, {"type": "object", "properties": {"b": FLAG}, "required": ["b"]}]},
    "tuple": {"type": "array", "prefixItems": [SHORT, INTEGER, FLAG], "items": False, "minItems": 3},
    "matrix": _array(_array(INTEGER, minItems=2, maxItems=2), minItems=2, maxItems=2),
    "ranges": _object({"a": {"type": "integer", "minimum": -5, "maximum": 5}, "b": {"type": "number", "minimum": 0.25, "maximum": 0.75}, "c": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100}}),
    "multiples": _object({"a": {"type": "integer", "multipleOf": 5}, "b": {"type": "integer", "multipleOf": 12, "minimum": 0}}),
    "lengths": _object({"code": {"type": "string", "minLength": 3, "maxLength": 3}, "note": {"type": "string", "minLength": 1, "maxLength": 20}}),
    "patterns": _object({"phone": {"type": "string", "pattern": "^\\+[0-9]{6,12}$"}, "slug": {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$"}, "inner": {"type": "string", "pattern": "ab"}}),
    "unicode keys": _object({"größe": INTEGER, "名前": SHORT, "🎉": FLAG, "a b\"c": {"type": "null"}}),
    "map": {"type": "object", "additionalProperties": INTEGER},
    "pattern map": {"type": "object", "patternProperties": {"^x-": INTEGER}, "additionalProperties": False},
    "counted map": {"type": "object", "additionalProperties": FLAG, "minProperties": 1, "maxProperties": 2},
    "open object": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
    "required without schema": {"type": "object", "required": ["z"], "properties": {"a": INTEGER}},
    "unique items": _array(INTEGER, uniqueItems=True),
    "contains": _array(INTEGER, contains={"const": 3}),
    "negation": {"not": {"type": "string"}},
    "conditional": {"type": "object", "properties": {"a": FLAG}, "if": {"properties": {"a": {"const": True}}}, "then": {"required": ["b"]}},
    "dependent": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
    "remote": {"$ref": "https://example.com/schema.json"},
    "unknown format": {"type": "string", "format": "made-up"},
    "lookahead": {"type": "string", "pattern": "^(?=a)b"},
    "unsatisfiable": {"type": "integer", "minimum": 3, "maximum": 1},
    "draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"p": {"type": "integer", "minimum": 1}}, "type": "object", "properties": {"port": {"$ref": "#/definitions/p"}}, "required": ["port"], "additionalProperties": False},
    "mutual": {"$defs": {"a": _object({"b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}), "b": _object({"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}})}, "$ref": "#/$defs/a"},
    "expression": {"$defs": {"e": {"anyOf": [INTEGER, _object({"op": {"enum": ["+", "*"]}, "args": _array({"$ref": "#/$defs/e"}, minItems=2, maxItems=2)})]}}, "$ref": "#/$defs/e"},
    "pydantic": {"title": "Answer", "description": "…", "type": "object", "properties": {"score": {"title": "Score", "type": "number", "minimum": 0, "maximum": 1, "default": 0.5}, "label": {"anyOf": [SHORT, {"type": "null"}], "default": None, "title": "Label"}}, "required": ["score"], "additionalProperties": False},
}  # fmt: skip


def generated(seed: int) -> Schema:
    """A schema by chance."""
    dice = random.Random(seed)
    return _made(dice, dice.randrange(1, 4))


def _made(dice: random.Random, depth: int) -> Schema:
    kinds = ["text", "pattern", "integer", "number", "flag", "enum", "format", "length"]
    if depth:
        kinds += ["object"] * 6 + ["array"] * 3 + ["union"] * 2 + ["tuple", "map"]
    kind = dice.choice(kinds)
    if kind == "object":
        names = dice.sample(["id", "name", "tags", "größe", "a-b", "value", "items", "x y", "on"], dice.randrange(1, 5))
        properties = {name: _made(dice, depth - 1) for name in names}
        return _object(properties, [name for name in names if dice.random() < 0.7])
    if kind == "array":
        least = dice.randrange(3)
        return _array(_made(dice, depth - 1), minItems=least, maxItems=least + dice.randrange(1, 3))
    if kind == "union":
        return {"anyOf": [_made(dice, depth - 1) for _ in range(dice.randrange(2, 4))]}
    if kind == "tuple":
        parts = [_made(dice, depth - 1) for _ in range(dice.randrange(1, 4))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "map":
        return {"type": "object", "additionalProperties": _made(dice, depth - 1), "maxProperties": 2}
    low = dice.randrange(-1000, 1000)
    plain: dict[str, Schema] = {
        "text": TEXT,
        "pattern": {"type": "string", "pattern": dice.choice(["^[a-f0-9]{8}$", "^(yes|no)$", "[0-9]{2}$", "^A.B$", "^\\w+$"])},
        "integer": {"type": "integer", "minimum": low, "maximum": low + dice.randrange(500)},
        "number": {"type": "number", "minimum": low / 8},
        "flag": FLAG,
        "enum": {"enum": dice.sample(["a", "b\n", "ü", 1, 2.5, None, False, [1, "x"]], dice.randrange(1, 5))},
        "format": {"type": "string", "format": dice.choice(["date", "date-time", "time", "uuid", "ipv4", "email"])},
        "length": {"type": "string", "minLength": dice.randrange(3), "maxLength": dice.randrange(3, 12)},
    }  # fmt: skip
    return plain[kind]


def bank() -> dict[str, Schema]:
    """By name: at least 200."""
    return WRITTEN | {f"generated {seed}": generated(seed) for seed in range(NUM_GENERATED)}
