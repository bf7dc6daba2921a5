"""Chats: messages of every kind become the prompt the template makes, answers have the agreed form."""

from __future__ import annotations

from typing import Any

import pytest
from callers import Api
from grids import in_turn
from scripted import ScriptedEngine

from turnout.server.text.tokenizer import Text

ASK = {"role": "user", "content": "Tell me about the sea."}


def prompt(engine: ScriptedEngine, text: Text) -> str:
    """The prompt the engine last saw."""
    request = engine.requests[-1]
    return text.decode(request.tokens[: request.num_prompt], skip_special_tokens=False)


def test_a_reply_has_the_agreed_form(api: Api, engine: ScriptedEngine, text: Text) -> None:
    reply = api.chat(max_tokens=4).good
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    assert (reply["model"], reply["system_fingerprint"]) == ("models/smol", "fp_scripted")
    (choice,) = reply["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": text.decode(engine.story[:4]), "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    num = engine.requests[0].num_prompt
    assert reply["usage"]["prompt_tokens"] == num and reply["usage"]["total_tokens"] == num + 4


def test_the_template_writes_the_prompt(api: Api, engine: ScriptedEngine, text: Text) -> None:
    api.chat([{"role": "system", "content": "Be brief."}, ASK])
    assert prompt(engine, text) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTell me about the sea.<|im_end|>\n<|im_start|>assistant\n"
    )


@in_turn(
    role=["system", "developer", "user", "assistant", "tool"],
    content=[{}, {"content": None}, {"content": ""}, {"content": []}],
)
def test_a_turn_without_content_is_kept_in_order(
    api: Api, engine: ScriptedEngine, text: Text, role: str, content: dict[str, Any]
) -> None:
    assert api.chat([ASK, {"role": role} | content, ASK]).status == 200
    shown = "system" if role == "developer" else role
    turn = "<|im_start|>user\nTell me about the sea.<|im_end|>\n"
    assert prompt(engine, text).endswith(f"{turn}<|im_start|>{shown}\n<|im_end|>\n{turn}<|im_start|>assistant\n")


def test_text_parts_are_the_same_prompt_as_their_text(api: Api, engine: ScriptedEngine, text: Text) -> None:
    def ids(content: Any) -> list[int]:
        assert api.chat([{"role": "user", "content": content}]).status == 200
        return engine.requests[-1].tokens[: engine.requests[-1].num_prompt]

    part = [{"type": "text", "text": "Say hello."}]
    assert ids(part) == ids("Say hello.")
    assert ids([{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]) == ids("Say\nhello.")
    assert ids([{"type": "text", "text": "Say hello.", "cache_control": {"type": "ephemeral"}}]) == ids("Say hello.")


def test_a_history_of_tool_calls_is_accepted(api: Api, engine: ScriptedEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    reply = api.chat(
        [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            ASK | {"name": "ann"},
        ]
    )
    assert reply.status == 200


def test_templates_get_the_arguments_of_past_calls_as_objects(
    api: Api, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(text, "render", lambda messages, **options: seen.append((messages, options)) or "Hello")
    for arguments in ('{"city": "Paris"}', "not json", None, '["a"]'):
        api.chat([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}, ASK])
    got = [messages[0]["tool_calls"][0]["function"]["arguments"] for messages, _ in seen]
    assert got == [{"city": "Paris"}, "not json", {}, '["a"]']


def test_tools_are_shown_to_the_template_when_none_is_to_be_called(
    api: Api, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(text, "render", lambda messages, **options: seen.append(options) or "Hello")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert api.chat(tools=tools, tool_choice="none").status == 200
    assert seen[-1]["tools"] == tools
    assert api.chat(tool_choice="none", chat_template_kwargs={"thinking": True}, reasoning_effort="low").status == 200
    assert seen[-1]["tools"] is None
    assert seen[-1]["template_kwargs"] == {"thinking": True, "reasoning_effort": "low"}


@pytest.mark.parametrize("ending", ["It is", "It is ", "It is\n", " It is", "", "日本"])
def test_the_last_message_can_be_continued_to_the_character(
    api: Api, engine: ScriptedEngine, text: Text, ending: str
) -> None:
    for fields in ({}, {"add_generation_prompt": False}):
        assert (
            api.chat([ASK, {"role": "assistant", "content": ending}], continue_final_message=True, **fields).status
            == 200
        )
        assert prompt(engine, text).endswith(f"<|im_start|>assistant\n{ending}")


def test_the_prompt_for_the_answer_can_be_left_out(api: Api, engine: ScriptedEngine, text: Text) -> None:
    api.chat(add_generation_prompt=False)
    assert prompt(engine, text).endswith("sea.<|im_end|>\n")


def test_what_a_template_raises_is_a_400_with_its_own_message(
    api: Api, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    for template in ("{{ raise_exception('no system role here') }}", "{{ messages[0]['nothing'] + 1 }}", "{{ 1 / 0 }}"):
        monkeypatch.setattr(text._tokenizer, "chat_template", template)
        reply = api.chat()
        assert (reply.status, reply.error["param"]) == (400, "messages")
    monkeypatch.setattr(text._tokenizer, "chat_template", "{{ raise_exception('no system role here') }}")
    assert "no system role here" in api.chat().error["message"]
    monkeypatch.undo()
    assert api.chat().status == 200


def test_a_model_without_a_template_takes_completions_only(
    api: Api, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text._tokenizer, "chat_template", None)
    assert "completions" in api.chat().error["message"]
    assert api.complete().status == 200


class TestLogprobs:
    @pytest.mark.parametrize("best", [None, 0, 1, 20])
    def test_entries_have_the_agreed_form(self, api: Api, engine: ScriptedEngine, text: Text, best: int | None) -> None:
        fields = {} if best is None else {"top_logprobs": best}
        (choice,) = api.chat(max_tokens=3, logprobs=True, **fields).good["choices"]
        assert choice["logprobs"]["refusal"] is None
        content = choice["logprobs"]["content"]
        assert len(content) == 3
        for entry in content:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry["top_logprobs"]) == (best or 0)
            assert all(set(top) == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]

    def test_bytes_rebuild_characters_of_several_tokens(self, api: Api, engine: ScriptedEngine, text: Text) -> None:
        engine.script = lambda request: text.encode("日本🦜🌍")
        (choice,) = api.chat(logprobs=True).good["choices"]
        raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert raw.decode() == choice["message"]["content"] == "日本🦜🌍"

    def test_a_hidden_special_token_has_its_name_and_no_bytes(self, api: Api) -> None:
        fields = {"max_tokens": 2, "logprobs": True, "logit_bias": {"2": 100}}
        (choice,) = api.chat(**fields).good["choices"]
        (entry,) = choice["logprobs"]["content"]
        assert (entry["token"], entry["bytes"], choice["message"]["content"]) == ("<|im_end|>", None, "")
        (choice,) = api.chat(**fields, ignore_eos=True, skip_special_tokens=False).good["choices"]
        assert choice["logprobs"]["content"][0]["bytes"] == list(b"<|im_end|>")

    @pytest.mark.parametrize("lowest", [float("-inf"), float("nan")])
    def test_a_number_json_cannot_hold_is_minus_9999(self, api: Api, engine: ScriptedEngine, lowest: float) -> None:
        engine.lowest = lowest
        (choice,) = api.chat(max_tokens=1, logprobs=True, top_logprobs=20).good["choices"]
        assert choice["logprobs"]["content"][0]["top_logprobs"][-1]["logprob"] == -9999.0

    def test_tokens_can_be_named_by_their_ids(self, api: Api, engine: ScriptedEngine) -> None:
        (choice,) = api.chat(max_tokens=1, logprobs=True, return_tokens_as_token_ids=True).good["choices"]
        assert choice["logprobs"]["content"][0]["token"] == f"token_id:{engine.story[0]}"

    def test_prompt_logprobs_and_ids_come_beside_the_choices(self, api: Api, engine: ScriptedEngine) -> None:
        reply = api.chat(max_tokens=2, n=2, prompt_logprobs=1, return_token_ids=True).good
        ids = engine.requests[0].tokens[: engine.requests[0].num_prompt]
        assert reply["prompt_token_ids"] == ids
        assert len(reply["prompt_logprobs"]) == len(ids) and reply["prompt_logprobs"][0] is None
        assert [choice["token_ids"] for choice in reply["choices"]] == [engine.story[:2]] * 2


def test_choices_are_numbered_and_the_prompt_counts_once(api: Api, engine: ScriptedEngine) -> None:
    one, three = api.chat(max_tokens=6).good["usage"], api.chat(max_tokens=6, n=3, temperature=1, seed=3).good
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 18


def test_a_long_conversation_does_not_keep_others_waiting(
    api: Api, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    plain, threads = text.render, []

    def render(messages: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return plain(messages, **options)

    monkeypatch.setattr(text, "render", render)
    api.chat("short", max_tokens=1)
    api.chat("a long one " * 500, max_tokens=1)
    assert threads[0] == "MainThread" and threads[1].startswith("tokenize")


def test_a_conversation_that_can_never_fit_is_refused_before_it_is_templated(
    api: Api, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "render", lambda messages, **options: pytest.fail("it was templated"))
    reply = api.chat("sea " * 2_000_000)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "context_length_exceeded", "messages")


def test_prompts_tokenized_at_once_on_threads_come_out_as_alone(api: Api, engine: ScriptedEngine, text: Text) -> None:
    prompts = [f"number {i} " + "the sea and the sky " * 300 for i in range(12)]
    calls = [("POST", "/v1/completions", {"json": {"prompt": prompt, "max_tokens": 1}}) for prompt in prompts]
    assert {reply.status for reply in api.together(calls)} == {200}
    assert sorted(r.tokens[: r.num_prompt] for r in engine.requests) == sorted(
        text.encode(prompt) for prompt in prompts
    )
