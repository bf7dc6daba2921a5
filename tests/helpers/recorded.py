"""Answers with tool calls and reasoning in each family's format, written by hand: docs/tools.md says what they were checked against."""

from __future__ import annotations

from typing import Any, NamedTuple

CALLS = [("weather", {"city": "São Paulo 🌊", "days": 3}), ("tides", {})]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "tides"}},
]


class Recorded(NamedTuple):
    """What a model wrote, and what a client must get of it."""

    tool_parser: str
    text: str
    content: str | None = None
    calls: list[tuple[str, dict[str, Any]]] = CALLS
    reasoning_parser: str = "none"
    reasoning: str | None = None


ONE = CALLS[:1]
ANSWERS = {
    "hermes": Recorded(
        "hermes",
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "São Paulo 🌊", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "tides", "arguments": {}}\n</tool_call>',
        "I look.",
    ),
    "qwen3 thinks": Recorded(
        "hermes",
        "<think>\nWhich city?\n</think>\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "S\\u00e3o Paulo \\ud83c\\udf0a", "days": 3}}\n</tool_call>',
        None,
        ONE,
        "think",
        "Which city?",
    ),
    "qwen3 coder": Recorded(
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nSão Paulo 🌊\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=tides>\n</function>\n</tool_call>",
        "I look.",
    ),
    "llama 3": Recorded(
        "llama3",
        '{"name": "weather", "parameters": {"city": "São Paulo 🌊", "days": 3}}; {"name": "tides", "parameters": {}}',
    ),
    "llama 3 python tag": Recorded("llama3", '<|python_tag|>weather.call(city="São Paulo 🌊", days=3)', None, ONE),
    "llama 4": Recorded("llama4", '[weather(city="São Paulo 🌊", days=3), tides()]'),
    "mistral v3": Recorded(
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "São Paulo 🌊", "days": 3}}, '
        '{"name": "tides", "arguments": {}}]',
    ),
    "mistral v11": Recorded(
        "mistral",
        'I look.[TOOL_CALLS]weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "São Paulo 🌊", "days": 3}[TOOL_CALLS]tides[ARGS]{}',
        "I look.",
    ),
    "magistral thinks": Recorded(
        "mistral",
        '[THINK]Which city?[/THINK][TOOL_CALLS]weather[ARGS]{"city": "São Paulo 🌊", "days": 3}',
        None,
        ONE,
        "mistral",
        "Which city?",
    ),
    "deepseek v3": Recorded(
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "São Paulo 🌊", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>tides\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek v3.1": Recorded(
        "deepseek",
        "Which city?</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "São Paulo 🌊", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>tides<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "I look.",
        CALLS,
        "deepseek_r1",
        "Which city?",
    ),
    "glm 4.5": Recorded(
        "glm",
        "<think>Which city?</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>São Paulo 🌊</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>tides\n</tool_call>",
        None,
        CALLS,
        "think",
        "Which city?",
    ),
    "kimi k2": Recorded(
        "kimi",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "São Paulo 🌊", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.tides:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
    ),
    "minimax m2": Recorded(
        "minimax",
        '<think>\nWhich city?\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">São Paulo 🌊</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="tides">\n</invoke>\n</minimax:tool_call>',
        None,
        CALLS,
        "think",
        "Which city?",
    ),
    "minimax m1": Recorded(
        "minimax",
        '<tool_calls>\n{"name": "weather", "arguments": {"city": "São Paulo 🌊", "days": 3}}\n'
        '{"name": "tides", "arguments": {}}\n</tool_calls>',
    ),
    "gpt-oss": Recorded(
        "harmony",
        "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "São Paulo 🌊", "days": 3}<|call|>',
        "I look.",
        ONE,
        "harmony",
        "Which city?",
    ),
    "gpt-oss answers": Recorded(
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>",
        "Sunny.",
        [],
        "harmony",
        "Easy.",
    ),
    "granite 3": Recorded(
        "granite",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "São Paulo 🌊", "days": 3}}, '
        '{"name": "tides", "arguments": {}}]',
    ),
    "granite 3.2 thinks": Recorded(
        "granite",
        "Here is my thought process: Easy. Here is my response: Sunny.",
        "Sunny.",
        [],
        "granite",
        "Easy.",
    ),
    "phi-4-mini": Recorded(
        "phi4",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "São Paulo 🌊", "days": 3}}]<|/tool_call|>',
        None,
        ONE,
    ),
    "functiongemma": Recorded(
        "gemma",
        "<start_function_call>call:weather{city:<escape>São Paulo 🌊<escape>,days:3}<end_function_call>"
        "<start_function_call>call:tides{}<end_function_call>",
    ),
    "gemma 4": Recorded(
        "gemma",
        '<|channel>thought\nWhich city?<channel|><|tool_call>call:weather{city:<|"|>São Paulo 🌊<|"|>,days:3}<tool_call|>',
        None,
        ONE,
        "gemma",
        "Which city?",
    ),
}
