"""What the server does not support is refused by name; what it does not know is ignored; an engine that fails says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from callers import BOTH, Api
from grids import every
from scripted import ScriptedEngine

from turnout.server.engine.bridge import EngineError


@every(
    ("path", "fields"),
    [
        (BOTH[0], {"suffix": "end"}),
        *((path, {"prompt_embeds": "AAAA"}) for path in BOTH),
        (BOTH[1], {"thinking_token_budget": 64}),
        (BOTH[1], {"functions": [{"name": "f"}]}),
        (BOTH[1], {"function_call": {"name": "f"}}),
        (BOTH[1], {"modalities": ["text", "audio"]}),
        (BOTH[1], {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}),
    ],
)
def test_what_is_not_supported_yet_is_refused_by_name_and_not_dropped(
    api: Api, path: str, fields: dict[str, Any]
) -> None:
    reply = api.ask(path, **fields)
    assert reply.status == 400
    assert reply.error["code"] == "unsupported_parameter"
    assert "not supported by this server yet" in reply.error["message"]
    assert ":" in reply.error["message"]  # and what to do instead


@pytest.mark.parametrize("fields", [{"response_format": "json"}, {"response_format": {"type": 7}}])
def test_a_response_format_without_a_type_is_a_400(api: Api, fields: dict[str, Any]) -> None:
    assert api.chat(**fields).error["param"] == "response_format"


@pytest.mark.parametrize("path", BOTH)
def test_unknown_fields_are_ignored_with_a_debug_line(api: Api, path: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = api.ask(path, max_tokens=4).good["choices"]
    with caplog.at_level(logging.DEBUG, "turnout.server"):
        reply = api.ask(path, max_tokens=4, store=True, metadata={"a": "b"}, a_field_of_next_year={"x": [1]})
    assert reply.good["choices"] == plain
    assert "a_field_of_next_year" in caplog.text


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("empty", [None, {}, []], ids=repr)
def test_an_empty_optional_field_is_the_same_as_an_absent_one(api: Api, path: str, empty: Any) -> None:
    from turnout.server.api.schema import ChatRequest, CompletionRequest

    kind = CompletionRequest if path == BOTH[0] else ChatRequest
    names = [name for name in kind.model_fields if name not in ("prompt", "messages")]
    plain = api.ask(path).good["choices"]
    assert (
        api.ask(path, **dict.fromkeys([*names, "suffix", "tools", "best_of"], empty) | {"temperature": 0}).good[
            "choices"
        ]
        == plain
    )


@pytest.mark.parametrize("path", BOTH)
def test_an_engine_that_is_gone_is_a_503_worth_a_retry(api: Api, engine: ScriptedEngine, path: str) -> None:
    engine.broken = "the engine process died: SIGKILL"
    reply = api.ask(path)
    assert reply.status == 503
    assert "SIGKILL" in reply.error["message"]
    assert int(reply.headers["retry-after"]) > 0


@pytest.mark.parametrize(("path", "stream"), [(BOTH[0], True), (BOTH[1], False)])
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("the logits are NaN", 500),
        (EngineError("the engine process died"), 503),
        (EngineError("this one failed", 500), 500),
        (ValueError("it does not fit"), 400),
        (RuntimeError("nobody foresaw this"), 500),
    ],
    ids=str,
)
def test_an_engine_that_fails_before_the_first_token_gives_the_status(
    api: Api, engine: ScriptedEngine, path: str, fault: Exception | str, status: int, stream: bool
) -> None:
    engine.fails_with = fault
    for n in (1, 3):
        reply = api.ask(path, stream=stream, n=n)
        assert reply.status == status
        unforeseen = isinstance(fault, RuntimeError) and not isinstance(fault, EngineError)
        assert (str(fault) in reply.error["message"]) is not unforeseen  # what nobody foresaw is for the log alone
    engine.fails_with = None
    assert api.ask(path).status == 200


def test_an_empty_text_asks_for_nothing(api: Api) -> None:
    assert api.complete(suffix="", max_tokens=1).status == 200
    assert api.complete(suffix=" end").status == 400


def test_the_param_of_an_error_is_the_name_of_its_field(api: Api) -> None:
    assert api.chat(response_format={"type": "yaml"}).error["param"] == "response_format"
    assert api.chat(audio={"voice": "x"}).error["param"] == "audio"
    part = {"type": "image_url", "image_url": {"url": "x"}}
    assert api.chat([{"role": "user", "content": [part]}]).error["param"] == "messages[0].content[0]"
