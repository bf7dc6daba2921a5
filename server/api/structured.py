"""The form of an answer, from the fields in which clients ask for it. It knows no tokenizer and compiles nothing.

    response_format      {"type": "json_object"}, "json_schema" with json_schema.schema, "structural_tag"; as OpenAI has it
    structured_outputs   {"json" | "json_object" | "regex" | "choice" | "grammar" | "structural_tag": …}; as vLLM has it
    guided_json, guided_regex, guided_choice, guided_grammar, structural_tag: the same, as it was spelled before

A schema is enforced whole, strict or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from turnout.core.types import StructuredSpec, Whitespace
from turnout.server.api.errors import ApiError, bad_request, show, unsupported

if TYPE_CHECKING:
    from turnout.server.api.schema import Generation

KINDS = {  # by the key in structured_outputs
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
GUIDED = {f"guided_{key}": key for key in ("json", "regex", "choice", "grammar")} | {"structural_tag": "structural_tag"}
OPTIONS = {"disable_any_whitespace", "whitespace", "disable_fallback"}
MAX_CHOICES = 10_000
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def field_of(body: Generation) -> str | None:
    """The field that says what form the answer must have; None: any."""
    given = body.response_format, body.structured_outputs
    names = [name for name, value in zip(("response_format", "structured_outputs"), given, strict=True) if value]
    names += [name for name in GUIDED if getattr(body, name) is not None]
    return names[0] if names else None


def form_of(body: Generation, whitespace: Whitespace) -> StructuredSpec | None:
    """The form that the request asks for; `whitespace` where it does not say. Raises ApiError naming the field."""
    found: list[tuple[str, str, Any]] = []  # field, kind, value
    if body.response_format is not None:
        found += _response_format(body.response_format)
    if body.structured_outputs is not None:
        whitespace = _whitespace(body.structured_outputs, whitespace)
        found += _structured_outputs(body.structured_outputs)
    for name, key in GUIDED.items():
        if getattr(body, name) is not None:
            found.append((name, KINDS[key], getattr(body, name)))
    if not found:
        return None
    if len(found) > 1:
        raise bad_request(f"an answer has one form: send {found[0][0]} or {found[1][0]}, not both", found[1][0])
    field, kind, value = found[0]
    try:
        return StructuredSpec(kind, _text(kind, value, field), whitespace)  # type: ignore[arg-type]
    except ValueError as error:
        raise bad_request(str(error), field) from None


def _response_format(form: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    kind = form.get("type")
    if not isinstance(kind, str):
        raise _wrong('response_format must be an object with a type, such as {"type": "text"}')
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", kind, None)]
    if kind == "structural_tag":
        return [("response_format", kind, {name: value for name, value in form.items() if name != "type"})]
    if kind != "json_schema":
        raise unsupported(
            f"response_format {kind[:40]!r}", "send text, json_object, json_schema or structural_tag", "response_format"
        )
    asked = form.get("json_schema")
    if not isinstance(asked, Mapping):
        raise _wrong("response_format.json_schema must be an object with a name and a schema")
    name = asked.get("name")
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise _wrong(f"response_format.json_schema.name must be 1 to 64 letters, digits, _ and -, got {show(name)}")
    if not isinstance(asked.get("strict"), bool | None):
        raise _wrong(f"response_format.json_schema.strict must be true or false, got {show(asked['strict'])}")
    schema = asked.get("schema")
    return [("response_format", kind, {} if schema is None else schema)]


def _structured_outputs(asked: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    field = "structured_outputs"
    given = {name: value for name, value in asked.items() if value is not None and value is not False}
    if strange := sorted(given.keys() - KINDS.keys() - OPTIONS):
        raise unsupported(f"{field}.{strange[0][:40]}", f"its fields are {', '.join([*KINDS, *sorted(OPTIONS)])}")
    found = [(field, KINDS[name], value) for name, value in given.items() if name in KINDS]
    if not found:
        raise bad_request(f"{field} must hold one of {', '.join(KINDS)}", field)
    return found


def _whitespace(asked: Mapping[str, Any], otherwise: Whitespace) -> Whitespace:
    if (compact := asked.get("disable_any_whitespace")) is not None:
        return "compact" if compact else "any"
    return asked.get("whitespace") or otherwise  # StructuredSpec checks it


def _text(kind: str, value: Any, field: str) -> str:
    """The value as `StructuredSpec` holds it."""
    if kind == "json_object":
        return ""
    if kind == "choice":
        if not (isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)):
            raise bad_request(f"{field}: a choice must be a list of texts that are not empty", field)
        if len(value) > MAX_CHOICES:
            raise bad_request(f"{field}: a choice may hold {MAX_CHOICES} texts, got {len(value)}", field)
        return json.dumps(value)
    if kind in ("regex", "grammar"):
        if not (isinstance(value, str) and value):
            raise bad_request(f"{field}: a {kind} must be a text that is not empty, got {show(value)}", field)
        return str(value)
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, Mapping | bool):
        raise bad_request(f"{field}: a {kind} must be an object, or its JSON as a text, got {show(value)}", field)
    return json.dumps(value, ensure_ascii=False)


def _wrong(message: str) -> ApiError:
    return bad_request(message, "response_format")
