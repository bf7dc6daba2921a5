"""Whatever a client sends, the answer is an error object with the right status, never a 500, and the next one is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from callers import BOTH, Api
from grids import every

from turnout.server.api.schema import MAX_BODY

JSON = {"content-type": "application/json"}


@every(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe{}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "logit_bias": {"1": NaN}}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 400 + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 9000 + b"}",
        b'{"prompt": [1' + b"0" * 9000 + b"]}",
    ],
)
def test_a_body_that_is_no_request_is_a_400(api: Api, body: bytes) -> None:
    reply = api.call("POST", "/v1/completions", content=body, headers=JSON)
    assert reply.status == 400
    assert reply.error["message"]
    assert api.complete().status == 200


BAD_FIELDS: list[dict[str, Any]] = [
    {"temperature": "hot"},
    {"temperature": 2.1},
    {"temperature": -0.1},
    {"top_p": 1.1},
    {"top_p": -0.1},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1},
    {"top_k": -7},
    {"top_k": 1.5},
    {"min_p": 2},
    {"max_tokens": -1},
    {"max_tokens": 1.5},
    {"n": 0},
    {"n": -1},
    {"n": 129},
    {"n": "two"},
    {"seed": "x"},
    {"seed": 2**70},
    {"stop": ""},
    {"stop": [""]},
    {"stop": [1]},
    {"stop": {"a": 1}},
    {"stop": ["a"] * 1000},
    {"stop": "a" * 5000},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"49152": 1}},
    {"logit_bias": {"1000000000000": 1}},
    {"logit_bias": {"9" * 5000: 1}},
    {"logit_bias": {"1": "x"}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"1": -101}},
    {"logit_bias": [1]},
    {"metadata": {"tenant": 7}},
    {"metadata": {"a" * 65: "x"}},
    {"metadata": {"tenant": "x" * 513}},
    {"metadata": {str(i): "x" for i in range(17)}},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": [-5]},
    {"stop_token_ids": [49152]},
    {"min_tokens": -1},
    {"min_tokens": 99, "max_tokens": 2},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": 1, "stream": True},
    {"stream": "maybe"},
    {"stream_options": 7},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}, "stream": False},
    {"model": 7},
    {"priority": 2**40},
]


def test_a_field_out_of_range_is_a_400_that_names_it_with_the_same_words_for_a_chat(api: Api) -> None:
    for fields in BAD_FIELDS:
        reply, chat = (api.ask(path, **fields) for path in BOTH)
        assert reply.status == 400, fields
        names = [name for name in fields if name != "max_tokens" or len(fields) == 1]
        assert any(name in (reply.error["param"] or "") for name in names), reply.error
        assert any(name in reply.error["message"] for name in names), reply.error
        assert (chat.status, chat.error) == (reply.status, reply.error)


@every(
    "prompt",
    [None, "", [], [[]], [""], ["a", ""], [1, "a"], [[1], "a"], [[1.5]], [1.5], True, 7, {"a": 1}, [True], [None]],
)
def test_a_prompt_of_no_known_form_or_without_tokens_is_a_400(api: Api, prompt: Any) -> None:
    reply = api.complete(prompt)
    assert reply.status == 400
    assert reply.error["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, 49152, 10**9, 2**63, 10**400], ids=lambda t: str(t)[:20])
def test_a_token_id_the_model_does_not_have_is_a_400_that_names_it(api: Api, token: int) -> None:
    for prompt in ([token], [[1, token]]):
        reply = api.complete(prompt)
        assert reply.status == 400
        assert str(token) in reply.error["message"] or "very large" in reply.error["message"] or token > 10**40
    assert api.complete([49151]).status == 200


@every(
    "fields",
    [
        {"messages": None},
        {"messages": "hi"},
        {"messages": {}},
        {"messages": []},
        {"messages": [1]},
        {"messages": [{}]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [7]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "no-such-part"}]}]},
        {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]},
        {"messages": [{"role": "assistant", "tool_calls": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 7}]}]},
        {"tools": "x"},
        {"tools": [{}], "tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": ""}}], "tool_choice": "none"},
        {"chat_template_kwargs": 7},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"messages": [{"role": "user", "content": ""}] * 20_000},
        {"top_logprobs": 5},
        {"top_logprobs": 2, "logprobs": False},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": -1, "logprobs": True},
        {"continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_a_chat_that_is_no_chat_is_a_400(api: Api, fields: dict[str, Any]) -> None:
    reply = api.post(BOTH[1], {"messages": [{"role": "user", "content": "hi"}]} | fields)
    assert reply.status == 400
    assert next(iter(fields)) in f"{reply.error['param']} {reply.error['message']}"


def test_an_unknown_model_is_a_404_with_a_code(api: Api) -> None:
    for path in BOTH:
        reply = api.ask(path, model="no-such-model")
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
        assert "models/smol" in reply.error["message"]


def test_the_model_goes_by_its_name_its_path_or_unnamed(api_with: Callable[..., Api]) -> None:
    api = api_with(served_model_name="sea")
    for name in ("sea", "models/smol", "elsewhere/smol", None):
        assert api.complete(model=name, max_tokens=1).good["model"] == "sea"
    assert [card["id"] for card in api.get("/v1/models").good["data"]] == ["sea"]


def test_an_unknown_path_and_a_wrong_method_have_the_agreed_form(api: Api) -> None:
    unknown, wrong = api.get("/v1/no-such-path"), api.get("/v1/completions")
    assert (unknown.status, wrong.status) == (404, 405)
    assert "/v1/no-such-path" in unknown.error["message"]
    assert "GET" in wrong.error["message"] and wrong.headers["allow"] == "POST"


def test_a_body_of_another_type_is_refused_so_that_web_pages_cannot_send_one(api: Api) -> None:
    for headers in ({"content-type": "text/plain"}, {}):
        reply = api.call("POST", "/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        assert reply.status == 415
        assert "application/json" in reply.error["message"]


def test_a_body_without_end_is_cut_off(api: Api) -> None:
    reply = api.call("POST", "/v1/completions", content=b" " * (MAX_BODY + 1), headers=JSON)
    assert reply.status == 413
    assert str(MAX_BODY) in reply.error["message"]


def test_a_bad_request_does_not_ask_for_a_retry(api: Api) -> None:
    for reply in (api.complete(temperature=9), api.complete(model="x"), api.get("/nowhere")):
        assert "retry-after" not in reply.headers
        assert reply.status not in (408, 409, 429)


def test_several_faults_are_told_at_once(api: Api) -> None:
    message = api.complete(temperature=9, top_p=9, n=0, seed="x", max_tokens=-1).error["message"]
    assert all(part in message for part in ("n:", "max_tokens:", "temperature:", "and 2 more"))


def test_a_message_never_repeats_a_whole_long_value(api: Api) -> None:
    for fields in ({"temperature": "x" * 10**6}, {"stop": {"x" * 10**6: 1}}, {"seed": list(range(10**5))}):
        assert len(api.complete(**fields).raw) < 1000
