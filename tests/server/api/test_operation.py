"""What clients and operators ask about the server: models, health, versions, keys, tokens, ids of requests."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from callers import BOTH, Api
from scripted import ScriptedEngine

from turnout.server.text.tokenizer import Text


def test_models_are_listed_and_read_by_name(api: Api) -> None:
    (card,) = api.get("/v1/models").good["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (
        "models/smol",
        "model",
        "turnout",
        2048,
    )
    assert isinstance(card["created"], int) and card["root"] == "models/smol" and card["parent"] is None
    assert api.get("/v1/models/models/smol").good == card  # a name may hold slashes
    missing = api.get("/v1/models/no-such-model")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_200_only_while_the_engine_can_answer(api: Api, engine: ScriptedEngine, path: str) -> None:
    assert api.get(path).status == api.call("HEAD", path).status == 200
    for engine.broken in ("loading", "draining: the server is shutting down", "the engine process died: SIGKILL"):
        reply = api.get(path)
        assert reply.status == 503 and engine.broken in reply.error["message"] and "retry-after" in reply.headers
    engine.broken = None
    assert api.get(path).status == 200


def test_versions_and_load(api: Api) -> None:
    assert api.get("/version").good == {"version": "0.1.0"}
    assert api.get("/load").good == {"server_load": 0}


def test_server_info_shows_the_whole_composition_but_no_secret(api_with: Callable[..., Api]) -> None:
    api = api_with(api_key="hush", max_queue=9)
    reply = api.get("/server_info", headers={"Authorization": "Bearer hush"})
    assert reply.good["fingerprint"] == "fp_scripted"
    assert reply.good["composition"]["attention"] == {"name": "torch"}
    assert reply.good["plugins"]["attention"]["package"] == "turnout"
    assert reply.good["server"]["max_queue"] == 9 and reply.good["max_num_seqs"] == 4
    assert b"hush" not in reply.raw


class TestKeys:
    def test_without_a_key_everything_is_open_to_any_token(self, api: Api) -> None:
        assert api.get("/v1/models", headers={"Authorization": "Bearer anything"}).status == 200

    @pytest.mark.parametrize(
        "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "hush"}, {"Authorization": "Bearer hüsh"}]
    )
    def test_a_missing_or_wrong_key_is_a_401(self, api_with: Callable[..., Api], header: dict[str, str]) -> None:
        api = api_with(api_key="hush")
        coded = {name: value.encode() for name, value in header.items()}
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", BOTH[0]),
            ("POST", BOTH[1]),
            ("GET", "/server_info"),
            ("GET", "/docs"),
        ):
            reply = api.call(method, path, headers=coded)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
            assert reply.headers["x-request-id"] and reply.headers["www-authenticate"] == "Bearer"

    def test_the_right_key_opens_and_probes_need_none(self, api_with: Callable[..., Api]) -> None:
        api = api_with(api_key="hush")
        assert api.get("/v1/models", headers={"Authorization": "Bearer hush"}).status == 200
        assert {api.get(path).status for path in ("/health", "/ping", "/metrics")} == {200}


class TestRequestIds:
    @pytest.mark.parametrize("path", BOTH)
    def test_every_reply_has_one_and_a_clients_own_comes_back(self, api: Api, path: str) -> None:
        first, second = api.ask(path), api.ask(path)
        ids = {reply.headers["x-request-id"] for reply in (first, second)}
        assert len(ids) == 2 and first.headers["x-request-id"] in first.good["id"]
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        for extra in ({}, {"stream": True}, {"temperature": 9}):
            reply = api.post(path, body | extra, headers={"X-Request-Id": "mine-1"})
            assert reply.headers["x-request-id"] == "mine-1"
        assert api.get("/nowhere", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"

    def test_the_body_may_name_the_reply(self, api: Api) -> None:
        assert api.chat(request_id="abc").good["id"] == "chatcmpl-abc"
        assert api.complete(request_id="abc", stream=True).chunks[0]["id"] == "cmpl-abc"

    @pytest.mark.parametrize("path", BOTH)
    def test_metadata_are_labels_for_the_scheduler_and_the_fields_of_that_name_win(
        self, api: Api, engine: ScriptedEngine, path: str
    ) -> None:
        api.ask(path, max_tokens=1, user="me", metadata={"tenant": "x", "ttft_target": "0.5", "user": "another"})
        assert engine.requests[0].labels.items() >= {"tenant": "x", "ttft_target": "0.5", "user": "me"}.items()

    @pytest.mark.parametrize("odd", [b"two words", b"x" * 300, b"", "ü".encode()], ids=repr)
    def test_an_id_that_does_not_fit_into_a_log_line_is_replaced(self, api: Api, odd: bytes) -> None:
        got = api.get("/health", headers={b"X-Request-Id": odd}).headers["x-request-id"]
        assert got and got.encode() != odd

    def test_two_requests_of_one_id_do_not_meet_in_the_engine(self, api: Api, engine: ScriptedEngine) -> None:
        call = ("POST", BOTH[0], {"json": {"prompt": "a", "n": 2}, "headers": {"X-Request-Id": "same"}})
        assert {reply.status for reply in api.together([call, call])} == {200}
        assert len({request.id for request in engine.requests}) == 4


def test_web_pages_of_named_origins_may_read_replies(api_with: Callable[..., Api]) -> None:
    api = api_with(cors_origins=["https://chat.example"], api_key="hush")
    asking = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    assert api.call("OPTIONS", BOTH[1], headers=asking).status == 200
    reply = api.get("/v1/models", headers={"Origin": "https://chat.example"})
    assert reply.status == 401 and reply.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-origin" not in api.get("/health", headers={"Origin": "https://other.example"}).headers


class TestTokens:
    BIRDS = "Birds 🦜 fly\n  over the sea"

    @pytest.mark.parametrize("root", ["", "/v1"])
    def test_a_text_becomes_ids_and_the_ids_the_text(self, api: Api, text: Text, root: str) -> None:
        reply = api.post(f"{root}/tokenize", {"model": api.model, "prompt": self.BIRDS}).good
        ids = text.encode(self.BIRDS)
        assert reply == {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}
        assert api.post(f"{root}/detokenize", {"tokens": ids}).good == {"prompt": self.BIRDS}

    def test_token_strings_come_when_asked_for(self, api: Api) -> None:
        reply = api.post("/tokenize", {"prompt": "The sea<|im_end|>", "return_token_strs": True}).good
        assert reply["token_strs"] == ["The", " sea", "<|im_end|>"]
        assert api.post("/detokenize", {"tokens": reply["tokens"]}).good == {"prompt": "The sea<|im_end|>"}

    def test_a_chat_counts_as_its_prompt(self, api: Api) -> None:
        messages = [{"role": "user", "content": "Tell me about the sea."}]
        assert (
            api.post("/tokenize", {"messages": messages}).good["count"]
            == api.chat(messages).good["usage"]["prompt_tokens"]
        )

    def test_empty_things_are_no_error(self, api: Api) -> None:
        assert api.post("/tokenize", {"prompt": ""}).good["tokens"] == []
        assert api.post("/detokenize", {"tokens": []}).good == {"prompt": ""}

    @pytest.mark.parametrize("tokens", [[-1], [10**9], [2**63], ["a"], [1.5], "abc", None], ids=str)
    def test_ids_that_do_not_exist_are_a_400(self, api: Api, tokens: object) -> None:
        assert api.post("/detokenize", {"tokens": tokens}).error["param"].startswith("tokens")

    @pytest.mark.parametrize(
        "body", [{}, {"prompt": 7}, {"prompt": "a", "messages": [{"role": "user"}]}, {"messages": []}], ids=str
    )
    def test_neither_or_both_of_prompt_and_messages_are_a_400(self, api: Api, body: dict[str, object]) -> None:
        reply = api.post("/tokenize", body)
        assert reply.status == 400 and "prompt" in reply.error["message"]

    def test_an_unknown_model_is_a_404(self, api: Api) -> None:
        assert api.post("/tokenize", {"model": "x", "prompt": "a"}).status == 404
        assert api.post("/detokenize", {"model": "x", "tokens": []}).status == 404


def test_a_fault_of_ours_is_a_500_in_the_agreed_form_and_logged(
    api: Api, text: Text, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ids: object, **options: object) -> str:
        raise KeyError("nobody foresaw this")

    monkeypatch.setattr(text, "decode", fail)
    reply = api.post("/detokenize", {"tokens": [1]})
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "nobody" not in reply.error["message"] and "nobody foresaw this" in caplog.text
    assert reply.headers["x-request-id"]


def test_replies_are_utf8_json_that_a_strict_reader_takes(api: Api, engine: ScriptedEngine, text: Text) -> None:
    engine.script = lambda request: text.encode("日本 \u2028 é")
    reply = api.chat()
    assert reply.headers["content-type"] == "application/json"
    assert json.loads(reply.raw.decode("utf-8"))["choices"][0]["message"]["content"] == "日本 \u2028 é"
