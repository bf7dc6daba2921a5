"""The form of an answer as clients ask for it: every spelling becomes one, and what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from callers import BOTH, Api
from scripted import ScriptedEngine

from turnout.core.types import Finish, Output, Request, StructuredSpec
from turnout.server.config import ServerConfig
from turnout.server.text.tokenizer import Text

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}


def wrapped(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA} | fields}}


def spec_of(engine: ScriptedEngine) -> StructuredSpec | None:
    """The form in which the engine was asked last."""
    asked = engine.asked[-1]
    request = asked if isinstance(asked, Request) else asked.request
    return request.sampling.structured


def text(schema: object) -> str:
    return json.dumps(schema, ensure_ascii=False)


SAME = [
    ({"response_format": {"type": "text"}}, None),
    ({}, None),
    ({"response_format": {"type": "json_object"}}, StructuredSpec("json_object")),
    (wrapped(), StructuredSpec("json_schema", text(SCHEMA))),
    (wrapped(strict=True, description="d"), StructuredSpec("json_schema", text(SCHEMA))),
    (wrapped(schema=None), StructuredSpec("json_schema", "{}")),
    ({"response_format": {"type": "structural_tag"} | TAG}, StructuredSpec("structural_tag", text(TAG))),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredSpec("json_schema", text(SCHEMA))),
    ({"structured_outputs": {"json": text(SCHEMA)}}, StructuredSpec("json_schema", text(SCHEMA))),
    ({"structured_outputs": {"json": SCHEMA, "whitespace": "any"}}, StructuredSpec("json_schema", text(SCHEMA), "any")),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
        StructuredSpec("json_schema", text(SCHEMA), "any"),
    ),
    ({"structured_outputs": {"json_object": True}}, StructuredSpec("json_object")),
    ({"structured_outputs": {"regex": "a+", "choice": None}}, StructuredSpec("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredSpec("choice", '["a", "b"]')),
    ({"structured_outputs": {"grammar": "start: A"}}, StructuredSpec("grammar", "start: A")),
    ({"structured_outputs": {"structural_tag": text(TAG)}}, StructuredSpec("structural_tag", text(TAG))),
    ({"guided_json": SCHEMA}, StructuredSpec("json_schema", text(SCHEMA))),
    ({"guided_regex": "a+"}, StructuredSpec("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, StructuredSpec("choice", '["a", "b"]')),
    ({"guided_grammar": "start: A"}, StructuredSpec("grammar", "start: A")),
    ({"structural_tag": TAG}, StructuredSpec("structural_tag", text(TAG))),
]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("fields, spec", SAME, ids=lambda value: str(value)[:60])
def test_every_spelling_becomes_the_form_it_means(
    api: Api, engine: ScriptedEngine, path: str, fields: dict[str, Any], spec: StructuredSpec | None
) -> None:
    assert api.ask(path, **fields).status == 200
    assert spec_of(engine) == spec


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "fields, param, named",
    [
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        *((wrapped(name=name), "response_format", "name") for name in ("", "a" * 65, "two words", 7)),
        (wrapped(strict="yes"), "response_format", "strict"),
        (wrapped(schema=[1]), "response_format", "must be an object"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"regex": 7}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"choice": ["a", 7]}}, "structured_outputs", "choice"),
        ({"structured_outputs": {"choice": ["a"] * 10_001}}, "structured_outputs", "10000"),
        ({"structured_outputs": {"whitespace": "any"}}, "structured_outputs", "must hold one of"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace": "some"}}, "structured_outputs", "some"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, None, "whitespace_pattern"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "one form"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one form"),
        (wrapped() | {"guided_regex": "a"}, "guided_regex", "one form"),
        ({"guided_whitespace_pattern": " "}, None, "guided_whitespace_pattern"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_a_400_that_names_it(
    api: Api, engine: ScriptedEngine, path: str, fields: dict[str, Any], param: str | None, named: str
) -> None:
    reply = api.ask(path, **fields)
    assert reply.status == 400 and named in reply.error["message"]
    assert param is None or reply.error["param"] == param
    assert not engine.asked


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_the_engine_refuses_is_a_400_before_the_stream(
    api: Api, engine: ScriptedEngine, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusing(asked: Request) -> Any:
        yield Output(asked.id, finish=Finish.REFUSED, error="the schema can't be enforced at #/properties/a: no")

    monkeypatch.setattr(engine, "generate", refusing)
    reply = api.ask(path, stream=stream, **wrapped())
    assert reply.status == 400 and reply.error["param"] == "response_format"
    assert "#/properties/a" in reply.error["message"]
    assert 'outcome="refused"' in api.get("/metrics").raw.decode()


def test_whitespace_is_what_the_server_was_told_unless_the_request_says(engine: ScriptedEngine, api_with: Any) -> None:
    api = api_with(json_whitespace="any")
    api.chat(**wrapped()).good  # noqa: B018  checks the status
    assert spec_of(engine) == StructuredSpec("json_schema", text(SCHEMA), "any")
    api.chat(structured_outputs={"json": SCHEMA, "whitespace": "compact"}).good  # noqa: B018
    assert spec_of(engine) == StructuredSpec("json_schema", text(SCHEMA))
    with pytest.raises(ValueError, match="server.json_whitespace"):
        ServerConfig(json_whitespace="some")


def test_an_answer_that_is_complete_ends_with_stop_and_all_its_text(
    api: Api, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, smollm2: str
) -> None:
    tokenizer = Text.load(smollm2)
    first, *_, last = ids = tokenizer.encode("yes no", add_special_tokens=False)
    assert len(ids) == 2

    async def complete(asked: Request) -> Any:
        yield Output(asked.id, (first,))
        yield Output(asked.id, (last,), Finish.COMPLETE)

    monkeypatch.setattr(engine, "generate", complete)
    for stream in (False, True):
        reply = api.ask(BOTH[0], stream=stream, guided_regex="yes no")
        choice = reply.choices()[-1] if stream else reply.good["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
        assert (reply.text() if stream else choice["text"]) == "yes no"
