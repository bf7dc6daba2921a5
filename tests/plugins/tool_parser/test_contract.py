"""Each tool parser keeps the contract's rules, in every way its models' templates write calls."""

from __future__ import annotations

import itertools
import json

import pytest

from turnout.core.parsers import CallDelta
from turnout.plugins import tool_parser as own
from turnout.testing.parsers import ToolParserContract

# What tells the formats apart; docs/tools.md says which published templates were looked at.
TEMPLATES = {
    own.Hermes: ["For each function call, return a json object within <tool_call></tool_call> XML tags"],
    own.Qwen3Coder: [
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
        "<seed:tool_call>\\n<function=name>\\n<parameter=key>value</parameter>",
    ],
    own.Llama3: ['<|start_header_id|> Respond in the format {"name": function name, "parameters": dictionary}'],
    own.Llama4: ["<|header_start|>assistant<|header_end|>"],
    own.Mistral: ["'[TOOL_CALLS] [' ~ calls ~ ']'", "'[TOOL_CALLS]' + name + '[ARGS]' + arguments"],
    own.DeepSeek: [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n'",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments",
    ],
    own.GLM: [
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>",
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>",
    ],
    own.Kimi: [
        "<|im_system|>tool_declare<|im_middle|>",
        "<|tool_calls_section_begin|>",
        "<think></think><|tool_calls_section_begin|>",
    ],
    own.MiniMax: ['<minimax:tool_call>\n<invoke name="tool-name">', '<tool_calls>\n{"name": <tool-name>'],
    own.Harmony: ["<|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>"],
    own.Granite: ["<|start_of_role|>available_tools<|end_of_role|>"],
    own.Phi4: ["<|tool|>' + message['tools'] + '<|/tool|>"],
    own.NoCalls: [],
    own.Gemma: ["<start_function_call>call:", '<|tool_call>call:" <|"|> "<tool_call|>'],
}
CONTRACTS = {
    kind: type(kind.__name__, (ToolParserContract,), {"make": kind, "templates": templates})
    for kind, templates in TEMPLATES.items()
}


@pytest.mark.parametrize("kind", CONTRACTS, ids=lambda kind: kind.__name__)
def test_every_rule_holds(kind: type) -> None:
    for rule in vars(ToolParserContract):
        if rule.startswith("test_"):
            getattr(CONTRACTS[kind](), rule)()


def test_every_parser_is_looked_at() -> None:
    offered: list[type] = []
    own.register_tool_parsers(lambda name, component: offered.append(component))
    assert set(offered) == set(CONTRACTS)


def test_no_template_fits_two_parsers() -> None:
    for (kind, templates), other in itertools.product(TEMPLATES.items(), TEMPLATES):
        for template in templates:
            assert other().fits(template) is (kind is other), f"{other.__name__}: {template}"


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_gemma_reads_null_as_its_template_prints_it_at_any_depth(size: int) -> None:
    text = '<|tool_call>call:a{n:None,o:{k:null},l:[None,<|"|>None<|"|>]}<tool_call|>'
    stream = own.Gemma().start([])
    events = [event for at in range(0, len(text), size) for event in stream.feed(text[at : at + size], ())]
    events += stream.finish(False)
    assert all(isinstance(event, CallDelta) for event in events)
    arguments = "".join(event.arguments for event in events if isinstance(event, CallDelta))
    assert json.loads(arguments) == {"n": None, "o": {"k": None}, "l": [None, "None"]}


def test_the_outer_tags_of_seed_oss_are_no_content() -> None:
    call = "<seed:tool_call>\n<function=a>\n<parameter=x>True</parameter>\n</function>\n</seed:tool_call>"
    stream = own.Qwen3Coder().start([])
    events = [*stream.feed(f"I look.\n\n{call}\n{call}", ()), *stream.finish(False)]
    assert [event for event in events if not isinstance(event, CallDelta)] == ["I look."]
    arguments = [event.arguments for event in events if isinstance(event, CallDelta) and event.name is None]
    assert [json.loads(text) for text in arguments] == [{"x": True}] * 2
