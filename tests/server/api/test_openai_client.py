"""The official client works with the server, for both endpoints, plain and streamed."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from callers import until
from scripted import ScriptedEngine

from turnout.server.engine.bridge import EngineError
from turnout.server.text.tokenizer import Text

ASK = [{"role": "user", "content": "Tell me about the sea."}]
MODEL = "models/smol"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_a_completion(client: openai.OpenAI, engine: ScriptedEngine, text: Text) -> None:
    story = text.decode(engine.story[:6])
    fields = {"model": MODEL, "prompt": "The sea is", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**fields)
    assert whole.choices[0].text == story and whole.usage.completion_tokens == 6
    assert len(whole.choices[0].logprobs.tokens) == 6 and whole._request_id
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == story
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []


def test_a_chat(client: openai.OpenAI, engine: ScriptedEngine, text: Text) -> None:
    fields = {"model": MODEL, "messages": ASK, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == text.decode(engine.story[:6])
    assert whole.choices[0].finish_reason == "length" and whole.system_fingerprint == "fp_scripted"
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    entries = [
        entry for chunk in chunks for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert entries == whole.choices[0].logprobs.content


def test_the_accumulating_helper_rebuilds_the_plain_reply(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    stop = {"extra_body": {"stop_token_ids": [engine.story[9]]}}  # the helper raises when an answer ends by length
    for n in (1, 2):
        fields = {"model": MODEL, "messages": ASK, "max_tokens": 20, "temperature": 0, "n": n} | stop
        plain = client.chat.completions.create(**fields)
        with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
            final = stream.get_final_completion()
        assert [c.message.content for c in final.choices] == [c.message.content for c in plain.choices]
        assert [c.finish_reason for c in final.choices] == ["stop"] * n
        assert final.choices[0].message.role == "assistant" and final.usage == plain.usage


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    def ask(**fields: object) -> None:
        client.chat.completions.create(**{"model": MODEL, "messages": ASK} | fields)

    with pytest.raises(openai.BadRequestError) as bad:
        ask(temperature=9)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(model="no-such-model")
    assert unknown.value.code == "model_not_found"
    engine.broken = "draining"
    with pytest.raises(openai.InternalServerError, match="draining"):
        ask()


def test_an_error_in_a_stream_raises(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.fails_with, engine.fails_after = EngineError("the engine process died"), 3
    seen = []
    with pytest.raises(openai.APIError, match="the engine process died"):
        seen.extend(client.chat.completions.create(model=MODEL, messages=ASK, stream=True))
    assert len(seen) == 4


def test_closing_a_stream_ends_the_request(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.pace = 0.005
    with client.chat.completions.create(model=MODEL, messages=ASK, stream=True, max_tokens=1500) as stream:
        next(iter(stream))
    until(lambda: bool(engine.left), 2)


def test_the_model_list(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
