"""Streams: their form, their counts, what breaks a silence, how they fail, and what a client that leaves brings about."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from callers import BOTH, Api, live, until
from scripted import ScriptedEngine

from turnout.core.types import Request
from turnout.server.api import streams
from turnout.server.api.app import create_app
from turnout.server.config import ServerConfig
from turnout.server.engine.bridge import EngineError
from turnout.server.text.tokenizer import Text


@pytest.mark.parametrize("path", BOTH)
class TestForm:
    def test_a_stream_says_what_it_is_and_ends_with_done(self, api: Api, path: str) -> None:
        reply = api.ask(path, stream=True, max_tokens=3)
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.events[-1] == "[DONE]" and reply.raw.endswith(b"data: [DONE]\n\n")

    def test_its_text_is_the_whole_replys(self, api: Api, path: str) -> None:
        for fields in ({"max_tokens": 20}, {"max_tokens": 20, "n": 3, "temperature": 1, "seed": 1}):
            whole = api.ask(path, **fields).good["choices"]
            stream = api.ask(path, **fields, stream=True)
            for choice in whole:
                text = choice["text"] if "text" in choice else choice["message"]["content"]
                assert stream.text(choice["index"]) == text

    def test_every_chunk_repeats_the_head(self, api: Api, path: str) -> None:
        chunks = api.ask(path, stream=True, n=2, stream_options={"include_usage": True}).chunks
        kind = "text_completion" if path == BOTH[0] else "chat.completion.chunk"
        for name in ("id", "created", "model", "object", "system_fingerprint"):
            assert len({chunk[name] for chunk in chunks}) == 1
        assert (chunks[0]["object"], chunks[0]["model"]) == (kind, "models/smol")
        assert chunks[0]["system_fingerprint"] == "fp_scripted"

    def test_usage_comes_once_at_the_end_when_asked_for(self, api: Api, path: str) -> None:
        for n in (1, 2):
            whole = api.ask(path, max_tokens=5, n=n).good["usage"]
            *early, last = api.ask(path, max_tokens=5, n=n, stream=True, stream_options={"include_usage": True}).chunks
            assert last["choices"] == [] and last["usage"] == whole
            assert all(chunk["choices"] and chunk["usage"] is None for chunk in early)

    @pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}], ids=str)
    def test_usage_does_not_come_unasked(self, api: Api, path: str, options: Any) -> None:
        for chunk in api.ask(path, stream=True, stream_options=options).chunks:
            assert "usage" not in chunk and chunk["choices"]

    def test_usage_can_come_with_every_chunk(self, api: Api, path: str) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = api.ask(path, stream=True, max_tokens=4, stream_options=options).chunks
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 4
        assert len(set(counts)) >= 4

    def test_each_choice_ends_once(self, api: Api, path: str) -> None:
        reply = api.ask(path, stream=True, n=3, max_tokens=4)
        for index in range(3):
            *early, last = reply.choices(index)
            assert last["finish_reason"] == "length" and not any(choice["finish_reason"] for choice in early)
        assert {choice["index"] for chunk in reply.chunks for choice in chunk["choices"]} == {0, 1, 2}

    def test_several_tokens_at_once_lose_nothing(self, api: Api, engine: ScriptedEngine, text: Text, path: str) -> None:
        for engine.per_output in (1, 2, 8, 100):
            assert api.ask(path, stream=True, max_tokens=30).text() == text.decode(engine.story[:30])

    def test_no_delta_splits_a_character(self, api: Api, engine: ScriptedEngine, text: Text, path: str) -> None:
        engine.script = lambda request: text.encode("日本語🦜🌍 ไทย\u2028é")
        for engine.per_output in (1, 3):
            reply = api.ask(path, stream=True, max_tokens=100)
            assert reply.text() == "日本語🦜🌍 ไทย\u2028é"
            assert "\ufffd" not in reply.raw.decode()
        assert reply.raw.isascii()  # U+2028 ends a line for some clients

    def test_bytes_that_stay_no_character_become_one_mark_at_the_end(
        self, api: Api, engine: ScriptedEngine, text: Text, path: str
    ) -> None:
        engine.script = lambda request: [*text.encode(" ok"), text.encode("🦜")[0]]
        assert api.ask(path, stream=True).text() == " ok\ufffd"


def test_the_first_chat_chunk_has_the_role_and_the_last_an_empty_delta(api: Api) -> None:
    reply = api.chat(stream=True, n=2, max_tokens=4)
    for index in range(2):
        first, *middle, last = reply.choices(index)
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(set(choice["delta"]) == {"content"} for choice in middle)
        assert last["delta"] == {} and last["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "fields"), [(BOTH[0], {"logprobs": 2}), (BOTH[1], {"logprobs": True, "top_logprobs": 2})]
)
def test_logprobs_come_with_their_tokens(
    api: Api, engine: ScriptedEngine, text: Text, path: str, fields: dict[str, Any]
) -> None:
    fields |= {"max_tokens": 8, "stop": text.decode(engine.story[5:9])}  # text is held back, entries are not
    whole = api.ask(path, **fields).good["choices"][0]["logprobs"]
    reply, tokens, said = api.ask(path, **fields, stream=True), [], ""
    for choice in reply.choices():
        part = choice["logprobs"]
        said += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        new = [] if part is None else part["tokens"] if path == BOTH[0] else [e["token"] for e in part["content"]]
        assert len(new) <= 1
        tokens += new
        assert "".join(tokens).startswith(said)
    assert tokens == (whole["tokens"] if path == BOTH[0] else [entry["token"] for entry in whole["content"]])


@pytest.mark.parametrize("path", BOTH)
class TestFailing:
    @pytest.mark.parametrize(
        "fault", ["the logits are NaN", EngineError("the engine process died"), RuntimeError("unforeseen")], ids=str
    )
    @pytest.mark.parametrize("n", [1, 3])
    def test_an_error_after_the_first_token_is_one_event_and_the_end(
        self, api: Api, engine: ScriptedEngine, path: str, fault: Exception | str, n: int
    ) -> None:
        engine.fails_with, engine.fails_after = fault, 3
        events = api.ask(path, stream=True, n=n).events
        errors = [json.loads(event)["error"] for event in events if '"error"' in event]
        assert len(errors) == 1 and "[DONE]" not in events
        assert set(errors[0]) == {"message", "type", "param", "code"} and errors[0]["message"]
        assert len(events) > 2
        until(lambda: engine.stats.num_running == 0)

    def test_a_refusal_keeps_its_status_though_a_stream_was_asked_for(
        self, api: Api, engine: ScriptedEngine, path: str
    ) -> None:
        assert api.ask(path, stream=True, temperature=9).status == 400
        engine.fails_with = ValueError("it does not fit")
        assert api.ask(path, stream=True).status == 400


class TestSilence:
    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streams, "PATIENCE", 0.05)
        monkeypatch.setattr(streams, "KEEP_ALIVE", 0.1)

    def test_the_first_byte_does_not_wait_for_the_engine(self, engine: ScriptedEngine, url: str) -> None:
        engine.before_first = 0.5
        began, seen = time.monotonic(), []
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2}
        with httpx.stream("POST", f"{url}{BOTH[1]}", json=body, timeout=5) as reply:
            for line in reply.iter_lines():
                seen.append((time.monotonic() - began, line))
        assert '"role":"assistant"' in seen[0][1] and seen[0][0] < 0.4
        assert [line for _, line in seen].count(": keep-alive") >= 2
        assert seen[-2][1] == "data: [DONE]" and seen[-2][0] > 0.5

    def test_an_error_after_the_early_head_is_an_event(self, api: Api, engine: ScriptedEngine) -> None:
        engine.before_first, engine.fails_with = 0.2, ValueError("it does not fit")
        *_, last = api.chat(stream=True).events
        assert json.loads(last)["error"]["message"] == "it does not fit"

    def test_nothing_is_sent_between_tokens_that_come_in_time(
        self, api: Api, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(streams, "KEEP_ALIVE", 0.4)
        engine.pace = 0.05
        assert b": keep-alive" not in api.chat(stream=True, max_tokens=12).raw


def test_a_slow_reader_gets_everything(engine: ScriptedEngine, text: Text, url: str) -> None:
    body = {"prompt": "a", "max_tokens": 500, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{url}{BOTH[0]}", json=body, timeout=20) as reply:
        time.sleep(0.3)
        events = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == text.decode((engine.story * 20)[:500])


def test_an_engine_that_ends_a_request_without_a_word_is_an_error(
    api: Api, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(request: Request, arrived: float) -> Any:
        return
        yield

    monkeypatch.setattr(engine, "_outputs", silent)
    for path in BOTH:
        assert api.ask(path).status == 500
        assert "without saying why" in api.ask(path, stream=True).error["message"]


def test_a_stream_over_a_real_connection_comes_token_by_token(engine: ScriptedEngine, text: Text) -> None:
    engine.pace = 0.01
    with live(create_app(engine, text, ServerConfig())) as url:
        moments = []
        body = {"prompt": "a", "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{url}{BOTH[0]}", json=body, timeout=20) as reply:
            for _ in reply.iter_raw():
                moments.append(time.monotonic())
    assert len(moments) >= 15 and moments[-1] - moments[0] > 0.1
