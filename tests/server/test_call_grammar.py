"""Grammars of tool calls: a model that draws at random among what a grammar allows writes calls that its parser reads and
that fit the functions' schemas, in every format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turnout.compose import plugins
from turnout.core.parsers import CallDelta
from turnout.core.types import StructuredSpec
from turnout.plugins.structured.llguidance import LLGuidance
from turnout.server.text.call_grammar import either, forced, schema_of, strict
from turnout.server.text.parsers import CollectedParts, Parts
from turnout.server.text.tokenizer import Text

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "exact": {"type": "boolean"},
                    "day": {"type": "string", "format": "date"},
                    "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "tides",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
TEMPLATES = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<function=",
    "llama3": "",
    "llama4": "",
    "mistral": "[TOOL_CALLS] [",
    "mistral v11": "[TOOL_CALLS] [ARGS]",
    "deepseek": "```json",
    "deepseek v3.1": "",
    "glm": "\n<arg_key>",
    "glm 4.7": "<arg_key>",
    "kimi": "",
    "minimax": "",
    "minimax m1": "<tool_calls>",
    "harmony": "",
    "granite": "",
    "phi4": "",
    "gemma": "<start_function_call>",
    "gemma 4": "<|tool_call>",
}


@pytest.fixture(scope="module", params=["text", "special"])
def folder(request: pytest.FixtureRequest, smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2's tokenizer, as it is, and with the formats' special tokens."""
    from transformers import AutoTokenizer

    if request.param == "text":
        return smollm2
    found = plugins.load()
    kinds = [found.get("tool_parser", name).component for name in found.names("tool_parser")]
    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": sorted({marker for kind in kinds for marker in getattr(kind, "markers", ())})}
    )
    made: Path = tmp_path_factory.mktemp("special")
    tokenizer.save_pretrained(made)
    return str(made)


class Dice:
    """Draws tokens at random among those a grammar allows; ends as soon as it may, after `patience` tokens."""

    def __init__(self, folder: str) -> None:
        self.text = Text.load(folder)
        self._structured = LLGuidance()
        self._structured.prepare(folder, self.text.vocab_size)
        self._row = torch.zeros((self.text.vocab_size + 31) // 32, dtype=torch.int32)
        spelled = [self.text.token_bytes(token) for token in range(self.text.vocab_size)]
        self._quick = np.array(
            [bool(set(raw) & set(b'"}])<[\n,')) for raw in spelled], dtype=np.uint8
        )  # what ends things
        self._may = np.array([token not in self.text.eos_ids for token in range(len(spelled))], dtype=np.uint8)

    def roll(self, spec: StructuredSpec, seed: int, begin: str = "", most: int = 240) -> str | None:
        """An answer that begins so; None: it was not over after `most` tokens."""
        dice, state = random.Random(seed), self._structured.compile(spec).start()
        tokens = self.text.encode(begin, add_special_tokens=False)
        assert state.advance(tokens) == len(tokens), f"{begin!r} is not allowed by {spec.value}"
        while not (state.finished or (state.accepting and (dice.random() < 0.3 or len(tokens) > most / 2))):
            if len(tokens) > most:
                return None
            state.fill(self._row)
            allowed = np.unpackbits(self._row.numpy().view(np.uint8), bitorder="little")[: len(self._quick)] & self._may
            quick = np.flatnonzero(allowed & self._quick)
            found = quick if len(quick) and dice.random() < 0.7 else np.flatnonzero(allowed)
            tokens.append(int(found[dice.randrange(len(found))]))
            assert state.advance(tokens[-1:]) == 1
        return self.text.decode(tokens, skip_special_tokens=False)


@pytest.fixture(scope="module")
def dice(folder: str) -> Dice:
    return Dice(folder)


def parsed(parser: Any, text: str) -> CollectedParts:
    parts, collected = Parts(None, parser.start(TOOLS)), CollectedParts()
    collected.add(parts.push(text, (), "stop"))
    assert not parts.num_broken, text
    return collected


def check(calls: list[tuple[CallDelta, str]], text: str) -> None:
    assert calls, text
    for first, arguments in calls:
        assert first.name is not None
        jsonschema.validate(json.loads(arguments), SCHEMAS[first.name], format_checker=jsonschema.FormatChecker())


def parser_of(case: str) -> Any:
    return plugins.load().get("tool_parser", case.split()[0]).component()


@pytest.mark.parametrize("single", [True, False], ids=["one call", "calls"])
@pytest.mark.parametrize("case", TEMPLATES)
def test_forced_calls_are_read_by_the_parser_and_fit_their_schemas(dice: Dice, case: str, single: bool) -> None:
    parser = parser_of(case)
    spec = forced(parser.form(TEMPLATES[case]), TOOLS, dice.text.added, single=single, compact=True)
    done = [text for text in (dice.roll(spec, seed) for seed in range(2)) if text is not None]
    assert done
    for text in done:
        found = parsed(parser, text)
        assert not found.content, text
        check(found.calls, text)
        assert not single or len(found.calls) == 1


@pytest.mark.parametrize("case", ["hermes", "qwen3_coder", "mistral v11", "glm", "kimi", "deepseek v3.1", "gemma"])
def test_a_strict_call_that_has_begun_in_free_text_fits_its_schema(dice: Dice, case: str) -> None:
    parser = parser_of(case)
    form = parser.form(TEMPLATES[case])
    spec = strict(form, TOOLS[:1], parser.markers, dice.text.added, compact=True)
    assert spec is not None
    opening = (form.before or form.begin).partition("{")[0].rstrip("\n")
    for seed in range(3):
        text = dice.roll(spec, seed, f"Let me see.\n{opening}")
        if text is not None:
            check(parsed(parser, text).calls[:1], text)
    assert dice.roll(spec, 0, "There is no need of a call.") is not None


@pytest.mark.parametrize("case", ["hermes", "qwen3_coder"])
def test_with_a_response_format_an_answer_is_a_call_or_has_the_form(dice: Dice, case: str) -> None:
    parser = parser_of(case)
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'
    spec = either(parser.form(TEMPLATES[case]), TOOLS, dice.text.added, schema, single=True, compact=True)
    answer = dice.roll(spec, 0, "{")
    assert answer is not None and json.loads(answer)["ok"] in (True, False)
    text = dice.roll(spec, 1, "<tool_call>")
    assert text is None or parsed(parser, text).calls


def test_what_can_not_be_enforced_in_raw_strings_is_refused_by_name(dice: Dice) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"at": {"type": "string", "format": "ipv6"}}}},
    }
    with pytest.raises(ValueError, match="at has the format 'ipv6'"):
        forced(parser_of("glm").form(""), [tool], dice.text.added, single=True, compact=True)


def test_objects_that_do_not_say_whether_they_have_other_properties_have_none() -> None:
    inner = {"properties": {"a": {"type": "string"}}}
    parameters = {
        "type": "object",
        "properties": {
            "one": inner,
            "many": {"type": "array", "items": {"anyOf": [inner, {"type": "null"}]}},
            "any": {"type": "object"},
        },
        "$defs": {"open": inner | {"additionalProperties": True}, "composed": {"properties": {}, "allOf": [inner]}},
    }
    found: Any = schema_of({"function": {"name": "f", "parameters": parameters}})
    closed = inner | {"additionalProperties": False}
    assert found["additionalProperties"] is False and found["properties"]["one"] == closed
    assert found["properties"]["many"]["items"]["anyOf"][0] == closed and found["properties"]["any"] == {
        "type": "object"
    }
    assert found["$defs"] == parameters["$defs"]
