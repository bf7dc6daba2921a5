"""Grammars that make a model write tool calls in its own format. They know no request and no library's objects.

A format whose calls stand alone and have JSON for arguments becomes a structural tag, which every grammar library takes;
one with a frame around its calls, or with arguments one by one, becomes a grammar in Lark with JSON schemas inside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnout.core.parsers import CallForm, ParameterForm, Tool
from turnout.core.types import StructuredSpec

NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY: Mapping[str, Any] = {"type": "object"}


def forced(
    form: CallForm, tools: Sequence[Tool], special: Callable[[str], int | None], *, single: bool
) -> StructuredSpec:
    """The answer is calls of these functions, at least one; `single`: exactly one. `special`: the id of a special token."""
    single = single or form.most == 1
    if form.parameters is None and (single or not (form.before or form.after or form.between)):
        structures = [
            {"begin": form.before + _begin(form, tool), "schema": schema_of(tool), "end": form.end + form.after}
            for tool in tools
        ]
        tag = {"structures": structures, "triggers": [_common(structures)], "at_least_one": True}
        return StructuredSpec("structural_tag", json.dumps(tag | ({"stop_after_first": True} if single else {})))
    return StructuredSpec("grammar", Lark(form, special).calls(tools, single=single))


def either(
    form: CallForm, tools: Sequence[Tool], special: Callable[[str], int | None], schema: str, *, single: bool
) -> StructuredSpec:
    """The answer is calls of these functions, or JSON by the schema."""
    calls = Lark(form, special).calls(tools, single=single).replace("start:", "calls:", 1)
    return StructuredSpec("grammar", f"start: calls | answer\n{calls}\nanswer: %json {schema}")


def strict(form: CallForm, tools: Sequence[Tool], markers: Sequence[str]) -> StructuredSpec | None:
    """Free text, in which a call once begun is one of these functions, and of a strict one has arguments by its schema.
    None: the format's arguments are no JSON."""
    if form.parameters is not None:
        return None
    begins = [_begin(form, tool) for tool in tools]
    alone = next((marker for marker in markers if form.begin.startswith(marker)), None)
    framed = alone is None and bool(form.before)
    structures = [
        {
            "begin": (form.before if framed else "") + begin,
            "schema": schema_of(tool) if tool["function"].get("strict") else ANY,
            "end": form.end + (form.after if framed else ""),
        }
        for tool, begin in zip(tools, begins, strict=True)
    ]
    leading = next((marker for marker in markers if form.before.startswith(marker)), None) if framed else alone
    trigger = form.trigger or leading or _common(structures)
    return StructuredSpec("structural_tag", json.dumps({"structures": structures, "triggers": [trigger]}))


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of a function's arguments."""
    found = tool["function"].get("parameters")
    return found if found else NOTHING


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

    def __init__(self, form: CallForm, special: Callable[[str], int | None]) -> None:
        self._form, self._special = form, special
        self._rules: list[str] = []

    def calls(self, tools: Sequence[Tool], *, single: bool) -> str:
        form = self._form
        names = [self._call(number, tool) for number, tool in enumerate(tools)]
        one = f"({' | '.join(names)})"
        more = "" if single else f" ({self._text(form.between)} {one})*"
        start = f"start: {self._text(form.before)} {one}{more} {self._text(form.after)}"
        return "\n".join([start, *self._rules])

    def _call(self, number: int, tool: Tool) -> str:
        name, form = f"call_{number}", self._form
        arguments = self._arguments(name, tool)
        begin, after = form.begin.replace("{name}", tool["function"]["name"]), form.end
        before, indexed, rest = begin.partition("{index}")
        opening = f"{self._text(before)} /[0-9]+/ {self._text(rest)}" if indexed else self._text(begin)
        self._rules.append(f"{name}: {opening} {arguments} {self._text(after)}")
        return name

    def _arguments(self, name: str, tool: Tool) -> str:
        schema, form = schema_of(tool), self._form.parameters
        if form is None:
            self._rules.append(f"{name}_json: %json {json.dumps(schema)}")
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
            self._rules.append(f"{rule}_json: %json {json.dumps(own | defs)}")
            self._rules.append(f"{rule}: {begin} {rule}_json {end}")
            return rule
        limits = sorted(own.keys() & {"pattern", "format", "minLength", "maxLength"})
        if limits:
            raise ValueError(
                f"parameters.properties.{key} has {', '.join(limits)}, which can't be enforced in this model's format, where "
                "strings are written as they are: leave it out, or send tool_choice: auto"
            )
        quote = form.quote
        if "enum" in own or "const" in own:
            values = own.get("enum", [own.get("const")])
            texts = " | ".join(
                self._text(quote + value + quote if isinstance(value, str) else json.dumps(value)) for value in values
            )
            self._rules.append(f"{rule}: {begin} ({texts}) {end}")
            return rule
        stop = quote + form.end
        if self._special(quote or form.end.strip()) is not None:
            self._rules.append(f"{rule}: {begin} {self._text(quote)} /(?s:.*)/ {self._text(stop)}")
        else:
            self._rules.append(f"{rule}_text[lazy]: /(?s:.*){_escaped(stop)}/")
            self._rules.append(f"{rule}: {begin} {self._text(quote)} {rule}_text")
        return rule

    def _text(self, text: str) -> str:
        """A text, its special tokens by id."""
        pieces = []
        for piece in re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text):
            token = self._special(piece) if piece else None
            if token is not None:
                pieces.append(f"<[{token}]>")
            elif piece:
                if pieces and pieces[-1].startswith('"'):
                    pieces[-1] = json.dumps(json.loads(pieces[-1]) + piece, ensure_ascii=False)
                else:
                    pieces.append(json.dumps(piece, ensure_ascii=False))
        return " ".join(pieces) or '""'


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether the schema allows strings, as far as it says."""
    kinds = schema.get("type")
    if kinds is None:
        return True
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _escaped(text: str) -> str:
    """The text in a regular expression between slashes."""
    return re.sub(r"([^\w\s])", r"\\\1", text).replace("\n", r"\n")
