"""Grammars that make a model write tool calls in its own format. They know no request and no library's objects.

A format whose calls stand alone and have JSON for arguments becomes a structural tag, which every grammar library takes;
one with a frame around its calls, or with arguments one by one, becomes a grammar in Lark with JSON schemas inside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnout.core.parsers import CallForm, ParameterForm, Tool
from turnout.core.types import StructuredSpec

NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
DAY = (  # without 29 February
    r"[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
)
FORMATS = {
    "date": DAY,
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "date-time": (
        DAY + r"T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
        r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
    ),
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
OPENING = {  # keywords beside which an object can't be closed without a look at the others
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas"),
}
ANY: Mapping[str, Any] = {"type": "object"}


def forced(
    form: CallForm, tools: Sequence[Tool], added: Mapping[str, int], *, single: bool, compact: bool
) -> StructuredSpec:
    """The answer is calls of these functions, at least one; `single`: exactly one. `added`: tokens that stand for
    themselves, by their texts."""
    single = single or form.most == 1
    if form.parameters is None and (single or not (form.before or form.after or "{index}" in form.begin)):
        structures = [
            {
                "begin": form.before + _begin(form, tool),
                "schema": schema_of(tool),
                "end": form.end + form.after,
            }
            for tool in tools
        ]
        tag = {"structures": structures, "at_least_one": True, "separator": form.between}
        return StructuredSpec("structural_tag", json.dumps(tag | ({"stop_after_first": True} if single else {})))
    return StructuredSpec("grammar", Lark(form, added, compact=compact).calls(tools, single=single))


def either(
    form: CallForm, tools: Sequence[Tool], added: Mapping[str, int], schema: str, *, single: bool, compact: bool
) -> StructuredSpec:
    """The answer is calls of these functions, or JSON by the schema."""
    lark = Lark(form, added, compact=compact)
    calls = lark.calls(tools, single=single).replace("start:", "calls:", 1)
    return StructuredSpec("grammar", f"start: calls | answer\n{calls}\nanswer: {lark.json(json.loads(schema))}")


def strict(
    form: CallForm, tools: Sequence[Tool], markers: Sequence[str], added: Mapping[str, int], *, compact: bool
) -> StructuredSpec | None:
    """Free text, in which a call once begun is one of these functions, and of a strict one has arguments by its schema; in
    formats whose arguments are no JSON, of the others too. None: the format frames its text in special tokens too."""
    if form.follows is not None:
        return None
    opening = form.before or form.begin
    trigger = next((marker for marker in markers if opening.startswith(marker)), None)
    if form.parameters is not None:
        return StructuredSpec("grammar", Lark(form, added, compact=compact).free(tools, trigger or opening[:1]))
    structures = [
        {
            "begin": form.before + _begin(form, tool),
            "schema": schema_of(tool) if tool["function"].get("strict") else ANY,
            "end": form.end + form.after,
        }
        for tool in tools
    ]
    tag = {"structures": structures, "triggers": [trigger or _common(structures)]}
    return StructuredSpec("structural_tag", json.dumps(tag))


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of a function's arguments, closed: an object that names its properties and does not say whether it has
    others has none. A function would not know them, and a weak model writes them without end."""
    found = tool["function"].get("parameters")
    closed: Mapping[str, Any] = _closed(found) if found else NOTHING
    return closed


def _closed(schema: Any, *, part: bool = False) -> Any:
    """The schema with its objects closed; `part`: others say more of the same object."""
    if isinstance(schema, list):
        return [_closed(item, part=part) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for word in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(word), dict):
            made[word] = {name: _closed(inner) for name, inner in schema[word].items()}
    for word in ("items", "prefixItems"):
        if word in schema:
            made[word] = _closed(schema[word])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            made[word] = _closed(schema[word], part=part or "properties" in schema)
    if "properties" in schema and not part and not schema.keys() & OPENING:
        made["additionalProperties"] = False
    return made


def _begin(form: CallForm, tool: Tool) -> str:
    return form.begin.replace("{name}", tool["function"]["name"]).replace("{index}", "0")


def _common(structures: Sequence[Mapping[str, Any]]) -> str:
    """The text with which all of them begin."""
    begins = [structure["begin"] for structure in structures]
    first, last = min(begins), max(begins)
    size = next((place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    return first[:size]


class Lark:
    """Writes a grammar as llguidance reads it: Lark with `%json` and with special tokens by their ids."""

    def __init__(self, form: CallForm, added: Mapping[str, int], *, compact: bool) -> None:
        self._form, self._added, self._compact = form, added, compact
        known = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        self._split = re.compile(known or "$^")
        self._rules: list[str] = []

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON by a schema."""
        return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': not self._compact}})}"

    def calls(self, tools: Sequence[Tool], *, single: bool) -> str:
        form = self._form
        names = [self._call(number, tool) for number, tool in enumerate(tools)]
        one = f"({' | '.join(names)})"
        more = "" if single else f" ({self._text(form.between)} {one})*"
        start = f"start: {self._text(form.before)} {one}{more} {self._text(form.after)}"
        return "\n".join([start, *self._rules])

    def free(self, tools: Sequence[Tool], trigger: str) -> str:
        """Free text, and calls whole from their trigger on, each in a frame of its own."""
        names = [self._call(number, tool, trigger) for number, tool in enumerate(tools)]
        if trigger in self._added:
            begun = f"TEXT {self._text(trigger)}"
        else:
            begun = "begun"
            self._rules.append(f"begun[lazy]: TEXT {json.dumps(trigger)}")
        start = f"start: ({begun} ({' | '.join(names)}))* TEXT"
        return "\n".join([start, r"TEXT: /(?s:.*)/", *self._rules])

    def _call(self, number: int, tool: Tool, trigger: str = "") -> str:
        """The rule of one call; with a trigger it begins behind that and has its frame."""
        name, form = f"call_{number}", self._form
        arguments = self._arguments(name, tool)
        begin, after = form.begin.replace("{name}", tool["function"]["name"]), form.end
        if trigger:
            begin, after = (form.before + begin).removeprefix(trigger), form.end + form.after
        before, indexed, rest = begin.partition("{index}")
        opening = f"{self._text(before)} /[0-9]+/ {self._text(rest)}" if indexed else self._text(begin)
        self._rules.append(f"{name}: {opening} {arguments} {self._text(after)}")
        return name

    def _arguments(self, name: str, tool: Tool) -> str:
        schema, form = schema_of(tool), self._form.parameters
        if form is None:
            self._rules.append(f"{name}_json: {self.json(schema)}")
            return f"{name}_json"
        properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
        given = [
            (key, self._parameter(f"{name}_{i}", key, properties[key], schema, form))
            for i, key in enumerate(properties)
        ]
        if not form.between:
            return " ".join(rule if key in required else f"{rule}?" for key, rule in given)
        return self._separated(given, required, self._text(form.between))

    def _separated(self, given: Sequence[tuple[str, str]], required: set[str], between: str) -> str:
        """Parameters in order, the optional ones left out or not, with a separator between those that are there."""
        tails = '""'
        heads = '""'
        for key, rule in reversed(given):
            with_this = f"({rule} {tails})"
            tails_with = f"({between} {rule} {tails})"
            if key in required:
                heads, tails = with_this, tails_with
            else:
                heads, tails = f"({with_this} | {heads})", f"({tails_with} | {tails})"
        return heads

    def _parameter(self, rule: str, key: str, schema: Any, root: Mapping[str, Any], form: ParameterForm) -> str:
        """One parameter: its name, its value, its end."""
        begin, end = self._text(form.begin.replace("{key}", key)), self._text(form.end)
        own = dict(schema) if isinstance(schema, Mapping) else {}
        defs = {word: root[word] for word in ("$defs", "definitions") if word in root}
        if form.quote is None or not _may_be_text(own):
            self._rules.append(f"{rule}_json: {self.json(own | defs)}")
            self._rules.append(f"{rule}: {begin} {rule}_json {end}")
            return rule
        quote = form.quote
        if "enum" in own or "const" in own:
            values = own.get("enum", [own.get("const")])
            texts = " | ".join(
                self._text(quote + value + quote if isinstance(value, str) else json.dumps(value)) for value in values
            )
            self._rules.append(f"{rule}: {begin} ({texts}) {end}")
            return rule
        stop = quote + form.end
        self._rules.append(f"{rule.upper()}: {_raw(key, own, stop.strip())}")
        self._rules.append(f"{rule}: {begin} {self._text(quote)} {rule.upper()} {self._text(stop)}")
        return rule

    def _text(self, text: str) -> str:
        """A text, its special tokens by id."""
        pieces, place = [], 0
        for found in self._split.finditer(text):
            pieces += [text[place : found.start()], f"<[{self._added[found.group()]}]>"]
            place = found.end()
        pieces.append(text[place:])
        spelled = [piece if i % 2 else json.dumps(piece, ensure_ascii=False) for i, piece in enumerate(pieces)]
        return " ".join(piece for piece in spelled if piece != '""') or '""'


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether the schema allows strings, as far as it says."""
    kinds = schema.get("type")
    if kinds is None:
        return True
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _raw(key: str, schema: Mapping[str, Any], stop: str) -> str:
    """A string that is written as it is, up to `stop`, as a terminal. Raises ValueError for what can't be enforced."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    terms = [f"/(?s:.{{{least},{most}}})/", f"~/(?s:.*){_escaped(stop)}(?s:.*)/"]
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise ValueError(
                f"the parameter {key} has the format {schema['format']!r}, which can't be enforced where strings are written "
                f"as they are, as this model does: leave it out, or use one of {', '.join(FORMATS)}"
            )
        terms.append(f"/{FORMATS[schema['format']]}/")
    if isinstance(schema.get("pattern"), str):
        pattern = schema["pattern"].replace("/", r"\/")
        before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if pattern.endswith("$") else "(?s:.*)"
        terms.append(f"/{before}({pattern.removeprefix('^').removesuffix('$')}){after}/")
    return " & ".join(terms)


def _escaped(text: str) -> str:
    """The text in a regular expression between slashes."""
    return re.sub(r"([\\.+*?^$(){}\[\]|/])", r"\\\1", text).replace("\n", r"\n")
