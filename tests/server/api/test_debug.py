"""What the engine does and why, over HTTP, where server.debug=true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from callers import Api
from observed import Observed
from scripted import ScriptedEngine

from turnout.server.api.app import create_app
from turnout.server.config import ServerConfig
from turnout.server.engine.bridge import EngineError
from turnout.server.text.tokenizer import Text

PATHS = ("/debug/engine", "/debug/requests", "/debug/requests/abc")


@pytest.fixture
def debugged(text: Text) -> Api:
    return Api(create_app(Observed(), text, ServerConfig(debug=True)), "fake")


def test_debug_routes_are_off_unless_asked_for_and_say_how(api: Api) -> None:
    for path in PATHS:
        reply = api.get(path)
        assert reply.status == 404 and "server.debug=true" in reply.error["message"]


def test_debug_routes_need_the_key_that_the_api_needs(api_with: Callable[..., Api]) -> None:
    api = api_with(debug=True, api_key="hush")
    assert [api.get(path).status for path in PATHS] == [401] * 3


def test_a_client_reads_where_its_requests_time_went_by_any_of_its_ids(debugged: Api) -> None:
    reply = debugged.complete([5, 6, 7], max_tokens=3, n=2, request_id="mine")
    for name in ("mine", reply.good["id"]):
        found = debugged.get(f"/debug/requests/{name}").good["requests"]
        assert [account["client_id"] for account in found] == ["mine", "mine"]
        for account in found:
            assert account["state"] == "length" and account["generated_tokens"] == 3
            assert sum(piece["seconds"] for piece in account["pieces"]) == pytest.approx(account["seconds"])
    (one,) = debugged.get(f"/debug/requests/{found[1]['id']}").good["requests"]
    assert one == found[1]
    reasons = [piece["reason"] for account in found for piece in account["pieces"] if piece["what"] == "queued"]
    assert "every seat is taken" in reasons


def test_an_unknown_request_is_a_404_that_says_where_to_look(debugged: Api) -> None:
    reply = debugged.get("/debug/requests/nobody")
    assert (reply.status, reply.error["code"]) == (404, "request_not_found")
    assert "GET /debug/requests" in reply.error["message"]


def test_known_requests_are_listed_the_last_one_that_ended_first(debugged: Api) -> None:
    for name in ("first", "second"):
        debugged.complete([5, 6, 7], max_tokens=2, request_id=name)
    listed = debugged.get("/debug/requests").good["requests"]
    assert [(entry["client_id"], entry["state"]) for entry in listed] == [("second", "length"), ("first", "length")]
    assert all(entry["seconds"] > 0 for entry in listed)


def test_the_last_steps_are_shown_with_what_they_computed(debugged: Api) -> None:
    debugged.complete([5, 6, 7], max_tokens=3)
    shown = debugged.get("/debug/engine").good
    assert [(step["prefill_tokens"], step["decodes"]) for step in shown["steps"]] == [(3, 0), (0, 1), (0, 1)]
    assert shown["stats"]["generated_tokens"] == 3


def test_a_dead_engine_is_a_503(engine: ScriptedEngine, text: Text) -> None:
    async def gone(topic: str, name: str = "") -> Any:
        raise EngineError("the engine process died: SIGKILL")

    engine.ask = gone  # type: ignore[attr-defined]
    api = Api(create_app(engine, text, ServerConfig(debug=True)), engine.info.model)
    reply = api.get("/debug/engine")
    assert reply.status == 503 and "SIGKILL" in reply.error["message"]
