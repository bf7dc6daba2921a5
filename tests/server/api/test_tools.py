"""Tool calls and reasoning through the whole server: a scripted model writes, a client reads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from callers import Api, Reply
from recorded import ANSWERS, CALLS, TOOLS, Recorded
from scripted import ScriptedEngine

from turnout.compose import plugins
from turnout.server.api.app import create_app
from turnout.server.config import ServerConfig
from turnout.server.text.parsers import Parsers, chosen_parsers
from turnout.server.text.tokenizer import Text

Serve = Callable[..., tuple[Api, ScriptedEngine]]


@pytest.fixture(scope="module")
def marked(smollm2: str) -> Text:
    """SmolLM2's tokenizer with every format's special tokens as special ones."""
    from transformers import AutoTokenizer

    found = plugins.load()
    kinds = [
        found.get(slot, name).component for slot in ("tool_parser", "reasoning_parser") for name in found.names(slot)
    ]
    markers = sorted({marker for kind in kinds for marker in getattr(kind, "markers", ())})
    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    return Text(tokenizer, {})


def parsers_of(tool: str, reasoning: str = "none") -> Parsers:
    found, names = plugins.load(), {"tool_parser": tool, "reasoning_parser": reasoning}
    made = [found.get(slot, name).component() for slot, name in names.items()]
    return chosen_parsers(*made, names, found, "")


@pytest.fixture
def serve(text: Text, marked: Text) -> Serve:
    """An application whose model writes what it is told, as ordinary tokens or with special ones."""

    def make(
        written: str, tool: str = "hermes", reasoning: str = "none", *, special: bool = False, per_output: int = 1
    ) -> Any:
        own = marked if special else text
        engine = ScriptedEngine(own, vocab_size=own.vocab_size)
        engine.per_output = per_output
        engine.script = lambda request: [*own.encode(written, add_special_tokens=False), min(own.eos_ids)]
        return Api(create_app(engine, own, ServerConfig(), parsers_of(tool, reasoning)), engine.info.model), engine

    return make


class Gathered:
    """A stream put together as clients do, its deltas looked at."""

    def __init__(self, reply: Reply, index: int = 0) -> None:
        self.content = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        choices = reply.choices(index)
        for choice in choices:
            delta = choice["delta"]
            self.content += delta.get("content") or ""
            self.reasoning += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                self._add(call)
        assert choices[-1]["delta"] == {}
        self.finish = choices[-1]["finish_reason"]

    def _add(self, call: dict[str, Any]) -> None:
        function = call["function"]
        if call["index"] == len(self.calls):
            assert set(call) == {"index", "id", "type", "function"} and call["type"] == "function" and call["id"]
            assert function["name"] and function["arguments"] == ""
            self.calls.append({"id": call["id"], "name": function["name"], "arguments": ""})
        else:
            assert call["index"] == len(self.calls) - 1
            assert set(call) == {"index", "function"} and set(function) == {"arguments"}
            self.calls[-1]["arguments"] += function["arguments"]


@pytest.mark.parametrize("per_output", [1, 4])
@pytest.mark.parametrize("special", [False, True], ids=["as text", "as special tokens"])
@pytest.mark.parametrize("recorded", ANSWERS.values(), ids=ANSWERS)
def test_every_format_comes_whole_and_as_a_stream_alike(
    serve: Serve, recorded: Recorded, special: bool, per_output: int
) -> None:
    api, _ = serve(
        recorded.text, recorded.tool_parser, recorded.reasoning_parser, special=special, per_output=per_output
    )
    whole = api.chat(tools=TOOLS).good["choices"][0]
    message = whole["message"]
    made = [call["function"] for call in message.get("tool_calls", [])]
    assert [(call["name"], json.loads(call["arguments"])) for call in made] == recorded.calls
    assert message["content"] == recorded.content
    assert message.get("reasoning") == message.get("reasoning_content") == recorded.reasoning
    assert whole["finish_reason"] == ("tool_calls" if recorded.calls else "stop")
    streamed = Gathered(api.chat(tools=TOOLS, stream=True))
    assert streamed.content == (recorded.content or "") and streamed.reasoning == (recorded.reasoning or "")
    assert [{"name": c["name"], "arguments": c["arguments"]} for c in streamed.calls] == made
    assert streamed.finish == whole["finish_reason"]


def test_a_call_has_an_id_of_its_own_and_the_models_own_where_it_writes_one(serve: Serve) -> None:
    api, _ = serve(ANSWERS["hermes"].text)
    ids = [call["id"] for _ in range(2) for call in api.chat(tools=TOOLS).good["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 4 and all(id.startswith("call_") for id in ids)
    api, _ = serve(ANSWERS["kimi k2"].text, "kimi")
    calls = api.chat(tools=TOOLS).good["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.weather:0", "functions.tides:1"]
    api, _ = serve(ANSWERS["mistral v11"].text, "mistral")
    calls = api.chat(tools=TOOLS).good["choices"][0]["message"]["tool_calls"]
    assert calls[0]["id"] == "aB3dE6gH9" and len(calls[1]["id"]) == 9  # its template takes no other


def test_broken_calls_are_text_and_counted_and_never_an_error(serve: Serve) -> None:
    for written, num_broken in (
        ('<tool_call>\n{"name": "weather", "arguments": {"city": Paris}}\n</tool_call>', 1),
        ("I look. <tool_call>weather(Paris)</tool_call>", 1),
        ('<tool_call>{"arguments": {}}</tool_call> <tool_call>{"name": 7}</tool_call>', 2),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Par', 1),
        ("<tool_call>" + '{"name": "tides", "arguments": ' + "[" * 5000, 1),
    ):
        api, _ = serve(written)
        choice = api.chat(tools=TOOLS).good["choices"][0]
        assert choice["message"]["content"] == written and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        streamed = Gathered(api.chat(tools=TOOLS, stream=True))
        assert streamed.content == written and streamed.finish == "stop"
        shown = api.get("/metrics").raw.decode()
        (line,) = [line for line in shown.splitlines() if line.startswith("turnout:tool_calls_broken_total{")]
        assert float(line.rpartition(" ")[2]) == 2 * num_broken


def test_a_good_call_behind_a_broken_one_is_called(serve: Serve) -> None:
    api, _ = serve(
        '<tool_call>{"name": "weather", "arguments": {"city": no}}</tool_call>\n'
        '<tool_call>{"name": "tides", "arguments": {}}</tool_call>'
    )
    choice = api.chat(tools=TOOLS).good["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["tides"]
    assert choice["finish_reason"] == "tool_calls" and "no}}</tool_call>" in choice["message"]["content"]


def test_an_answer_cut_inside_a_call_ends_as_length_with_what_came(serve: Serve, text: Text) -> None:
    api, engine = serve(ANSWERS["hermes"].text)
    engine.script = lambda request: text.encode(ANSWERS["hermes"].text)[: request.sampling.max_tokens]
    choice = api.chat(tools=TOOLS, max_tokens=24).good["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert json.dumps(CALLS[0][1], ensure_ascii=False).startswith(call["function"]["arguments"])


def test_without_tools_and_with_tool_choice_none_an_answer_is_text(serve: Serve) -> None:
    api, _ = serve(ANSWERS["hermes"].text)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = api.chat(**fields).good["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": ANSWERS["hermes"].text, "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_parallel_tool_calls_false_leaves_one_call(serve: Serve) -> None:
    api, _ = serve(ANSWERS["hermes"].text)
    choice = api.chat(tools=TOOLS, parallel_tool_calls=False).good["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert len(Gathered(api.chat(tools=TOOLS, parallel_tool_calls=False, stream=True)).calls) == 1


def test_several_choices_have_calls_of_their_own(serve: Serve) -> None:
    api, _ = serve(ANSWERS["qwen3 thinks"].text, "hermes", "think")
    reply = api.chat(tools=TOOLS, n=3, stream=True)
    assert [Gathered(reply, index).calls[0]["name"] for index in range(3)] == ["weather"] * 3
    assert {Gathered(reply, index).reasoning for index in range(3)} == {"Which city?"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
            "tool_choice",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 7}}]}, "tools"),
    ],
)
def test_a_tool_choice_that_can_not_be_kept_is_refused(serve: Serve, fields: dict[str, Any], param: str) -> None:
    api, _ = serve("Hello.")
    reply = api.chat(**fields)
    assert reply.status == 400 and (reply.error["param"] or "").startswith(param), reply.raw


@pytest.mark.parametrize("parser", sorted({recorded.tool_parser for recorded in ANSWERS.values()}))
def test_forced_calls_are_a_grammar_in_the_models_own_format(serve: Serve, parser: str) -> None:
    api, engine = serve("Hello.", parser)
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice, names in (("required", {"weather", "tides"}), (named, {"weather"}), (allowed, {"weather"})):
        assert api.chat(tools=TOOLS, tool_choice=choice).status == 200
        spec = engine.requests[-1].sampling.structured
        assert spec is not None and spec.kind in ("structural_tag", "grammar") and not spec.after
        assert {name for name in ("weather", "tides") if name in spec.value} == names
    api.chat(tools=TOOLS)
    assert engine.requests[-1].sampling.structured is None


def test_a_strict_function_has_its_arguments_constrained_once_a_call_begins(serve: Serve) -> None:
    api, engine = serve("Hello.")
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    api.chat(tools=strict)
    spec = engine.requests[-1].sampling.structured
    assert spec is not None and spec.kind == "structural_tag"
    tag = json.loads(spec.value)
    assert tag["triggers"] == ["<tool_call>"] and "at_least_one" not in tag
    assert [structure["schema"] for structure in tag["structures"]] == [
        TOOLS[0]["function"]["parameters"],
        {"type": "object"},
    ]


def test_grammars_wait_for_the_end_of_the_reasoning(serve: Serve) -> None:
    api, engine = serve("Hello.", "hermes", "think")
    api.chat(tools=TOOLS, tool_choice="required")
    spec = engine.requests[-1].sampling.structured
    assert spec is not None and spec.after == "</think>"
    api, engine = serve("Hello.", "harmony", "harmony")
    api.chat(tools=TOOLS, tool_choice="required")
    spec = engine.requests[-1].sampling.structured
    assert spec is not None and spec.after == "<|start|>assistant"


def test_reasoning_is_counted_and_may_be_left_out(serve: Serve, text: Text) -> None:
    api, _ = serve("<think>\nWhich city?\n</think>\n\nParis.", "none", "think")
    whole = api.chat().good
    num = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    inside = len(text.encode("\nWhich city?\n</think>", add_special_tokens=False))
    assert abs(num - inside) <= 2 and whole["choices"][0]["message"]["content"] == "Paris."
    hidden = api.chat(include_reasoning=False).good
    assert "reasoning" not in hidden["choices"][0]["message"] and hidden["usage"] == whole["usage"]
    last = api.chat(stream=True, stream_options={"include_usage": True}).chunks[-1]
    assert last["usage"] == whole["usage"]
    assert Gathered(api.chat(stream=True, include_reasoning=False)).reasoning == ""


def test_logprobs_and_ids_of_a_stream_are_those_of_all_tokens(serve: Serve) -> None:
    api, _ = serve(ANSWERS["qwen3 thinks"].text, "hermes", "think")
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = api.chat(**fields).good["choices"][0]
    choices = api.chat(**fields, stream=True).choices()
    assert [token for c in choices for token in c.get("token_ids", [])] == whole["token_ids"]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]


def test_reasoning_effort_none_turns_thinking_off_in_templates(
    serve: Serve, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, _ = serve("Hello.", "none", "think")
    seen: list[Any] = []
    monkeypatch.setattr(text, "render", lambda messages, **options: seen.append(options["template_kwargs"]) or "Hello")
    api.chat(reasoning_effort="none")
    api.chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": True})
    assert seen == [
        {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        {"reasoning_effort": "high", "enable_thinking": True},
    ]


def test_results_and_reasoning_of_the_past_reach_the_template(
    serve: Serve, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, _ = serve("Hello.")
    seen: list[Any] = []
    monkeypatch.setattr(text, "render", lambda messages, **options: seen.append(messages) or "Hello")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    said = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]}
    api.chat(
        [
            {"role": "user", "content": "a"},
            said,
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
        ]
    )
    _, assistant, result = seen[-1]
    assert assistant["reasoning_content"] == "Hm." and assistant["content"] == ""
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "sunny", "name": "weather"}


def test_random_texts_are_never_an_error_and_stall_no_neighbour(serve: Serve, text: Text) -> None:
    dice = random.Random(7)
    pieces = [
        '{"name": "weather", ',
        '"arguments": {',
        '"city": "x"',
        "}",
        "[",
        "\\",
        "\n",
        "🌊",
        "<think>",
        "</think>",
        "<function=",
    ]
    for parser in ("hermes", "qwen3_coder", "llama4", "mistral", "gemma", "harmony"):
        tool = parsers_of(parser).tool
        assert tool is not None
        texts = ["".join(dice.choices([*pieces, *tool.markers], k=12)) for _ in range(8)]
        api, engine = serve("", parser, "think")
        engine.script = lambda request, texts=texts: [*text.encode(texts[request.num_prompt % 8]), min(text.eos_ids)]
        messages = [[{"role": "user", "content": "a " * size}] for size in range(8)]
        calls = [
            ("POST", "/v1/chat/completions", {"json": {"messages": said, "tools": TOOLS, "stream": bool(i % 2)}})
            for i, said in enumerate(messages)
        ]
        assert [reply.status for reply in api.together(calls)] == [200] * 8
        assert engine.stats.num_running == 0 and not engine.left


def test_the_official_client_reads_calls_and_reasoning_of_a_stream(serve: Serve) -> None:
    import openai
    import pydantic
    from callers import live

    class weather(pydantic.BaseModel):
        city: str
        days: int

    api, _ = serve(ANSWERS["qwen3 thinks"].text, "hermes", "think")
    with live(api.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": api.model,
            "messages": [{"role": "user", "content": "The weather?"}],
            "tools": [openai.pydantic_function_tool(weather)],
        }
        whole = client.chat.completions.parse(**asked).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.tool_calls is not None
        assert whole.message.tool_calls[0].function.parsed_arguments == weather(**CALLS[0][1])
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.done" in kinds and final.tool_calls is not None
        assert final.tool_calls[0].function.parsed_arguments == weather(**CALLS[0][1])
        assert getattr(final, "reasoning_content", None) == "Which city?"
