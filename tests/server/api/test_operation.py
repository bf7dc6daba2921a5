"""What clients and operators ask about the server: models, health, versions, keys, tokens, ids of requests."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable

import pytest
from callers import BOTH, Api, Reply
from grids import every
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
        self, api_with: Callable[..., Api], engine: ScriptedEngine, path: str
    ) -> None:
        api = api_with(client_scheduling=True)
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

    @every("tokens", [[-1], [10**9], [2**63], ["a"], [1.5], "abc", None])
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


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_a_key_is_written_in_any_case(api_with: Callable[..., Api], scheme: str) -> None:
    api = api_with(api_key="hush")
    assert api.get("/v1/models", headers={"Authorization": f"{scheme} hush"}).status == 200
    assert api.get("/v1/models", headers={"Authorization": f"{scheme} Hush"}).status == 401
    assert api.get("/v1/models", headers={"Authorization": "Basic hush"}).status == 401


class TestHosts:
    """A page of a web site can give itself a name that leads here, and read what the browser gets."""

    @pytest.mark.parametrize(
        "host",
        ["localhost:8000", "127.0.0.1", "[::1]:9", "10.0.0.5:80", "turnout", "host.docker.internal", "a.localhost"],
    )
    def test_names_that_no_stranger_can_own_are_welcome(self, api: Api, host: str) -> None:
        assert api.get("/v1/models", headers={"Host": host}).status == 200

    @pytest.mark.parametrize("host", ["evil.example.com", "localhost.evil.com:8000", "127.0.0.1.nip.io"])
    @pytest.mark.parametrize("path", ["/v1/models", "/health"])
    def test_others_are_refused_where_no_key_protects_and_only_this_machine_should_come(
        self, api: Api, api_with: Callable[..., Api], host: str, path: str
    ) -> None:
        refused = api.get(path, headers={"Host": host})
        assert (refused.status, refused.error["code"]) == (403, "host_not_allowed")
        assert "server.allowed_hosts" in refused.error["message"]
        for options in ({"allowed_hosts": [host.partition(":")[0]]}, {"allowed_hosts": ["*"]}, {"host": "0.0.0.0"}):
            assert api_with(**options).get(path, headers={"Host": host}).status == 200
        key = {"Host": host, "Authorization": "Bearer k"}
        assert api_with(api_key="k").get(path, headers=key).status == 200


def test_a_target_in_absolute_form_finds_its_route(url: str) -> None:
    host = url.removeprefix("http://")
    for target, status in (("/v1/models", b"200"), ("/v1/models?x=1", b"200"), ("/nowhere", b"404")):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as one:
            one.sendall(f"GET {url}{target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            assert one.recv(65536).split()[1] == status


def test_methods_that_clients_invent_are_counted_as_one(api: Api) -> None:
    def invent(start: int) -> int:
        """Series there are after 20 more inventions."""
        for number in range(start, start + 20):
            api.call(f"INVENTED{number}", "/health")
            api.call(f"INVENTED{number}", f"/invented/{number}")
        return len(api.get("/metrics").raw.splitlines())

    invent(0)
    assert invent(20) == invent(40)
    assert b"INVENTED" not in api.get("/metrics").raw and b"invented" not in api.get("/metrics").raw


def test_the_model_has_aliases(api_with: Callable[..., Api]) -> None:
    api = api_with(model_aliases=["gpt-4o-mini", "default"])
    for name in ("gpt-4o-mini", "default", "models/smol"):
        reply = api.post("/v1/completions", {"model": name, "prompt": "Hello", "max_tokens": 1})
        assert reply.good["model"] == "models/smol"
    assert api.post("/v1/completions", {"model": "gpt-4", "prompt": "Hello"}).status == 404


class TestBodies:
    FORM = b'{"prompt": "Hello", "max_tokens": 1}'

    def send(self, api: Api, body: bytes, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return api.call("POST", "/v1/completions", content=body, headers={"content-type": "application/json"} | named)

    def test_a_byte_order_mark_is_no_part_of_the_json(self, api: Api) -> None:
        assert self.send(api, b"\xef\xbb\xbf" + self.FORM).status == 200

    @pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "deflate", "gzip, identity"])
    def test_an_encoded_body_is_refused_by_the_name_of_its_encoding(self, api: Api, encoding: str) -> None:
        refused = self.send(api, gzip.compress(self.FORM), content_encoding=encoding)
        assert refused.status == 415 and encoding in refused.error["message"]

    def test_identity_is_no_encoding(self, api: Api) -> None:
        assert self.send(api, self.FORM, content_encoding="identity").status == 200


class TestScheduling:
    """What a request says of its scheduling counts where the operator wants it to."""

    def test_metadata_reaches_no_scheduler_unless_clients_may_choose(self, api: Api, engine: ScriptedEngine) -> None:
        assert api.complete(metadata={"pin": "true", "tenant": "me"}, user="u", max_tokens=1).status == 200
        assert dict(engine.requests[-1].labels).keys() == {"user", "request"}

    @pytest.mark.parametrize("path", BOTH)
    def test_a_priority_is_refused_then_but_for_the_usual_one(self, api: Api, path: str) -> None:
        refused = api.ask(path, priority=-1)
        assert (refused.status, refused.error["param"]) == (400, "priority")
        assert "server.client_scheduling=true" in refused.error["message"]
        assert api.ask(path, priority=0, max_tokens=1).status == 200

    def test_both_count_where_they_may(self, api_with: Callable[..., Api], engine: ScriptedEngine) -> None:
        api = api_with(client_scheduling=True)
        assert api.complete(metadata={"pin": "true"}, priority=-3, max_tokens=1).status == 200
        request = engine.requests[-1]
        assert request.labels["pin"] == "true" and request.priority == -3


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/models"])
def test_a_base_url_without_v1_gets_a_hint(api: Api, path: str) -> None:
    missing = api.post(path, {}) if path != "/models" else api.get(path)
    assert missing.status == 404 and f"did you mean /v1{path}?" in missing.error["message"]
    assert "did you mean" not in api.get("/nowhere").error["message"]
