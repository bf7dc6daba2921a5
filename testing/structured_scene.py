"""What the rules of structured output stand on: a small tokenizer in a folder, walks through a grammar, what is asked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from turnout.core.structured import Grammar, GrammarState, Structured
from turnout.core.types import StructuredSpec

SPECIAL = ("<pad>", "<s>", "</s>", "<call>", "</think>")
END = SPECIAL.index("</s>")
MERGED = ("{}", '{"', '":', '","', "true", "false", "null", "ab", "yes", "no", "12", "]}", "é", "\\u", "</", "think")


@cache
def tokenizer_folder() -> str:
    """A folder with a byte-level tokenizer: special tokens, all bytes, a few longer ones that JSON is cut by."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = Path(mkdtemp(prefix="turnout-kit-"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words, merges = [*SPECIAL, *alphabet], []
    for word in MERGED:
        pieces = list(spelled.pre_tokenize_str(word)[0][0])
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces[:2] = ["".join(pieces[:2])]
            if pieces[0] not in words:
                words.append(pieces[0])
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = spelled
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<call>", "</think>"]})
    fast.save_pretrained(folder)
    return str(folder)


class Scene:
    """A prepared component with its tokenizer. The model has a few more ids than the tokenizer knows."""

    def __init__(self, structured: Structured) -> None:
        from transformers import AutoTokenizer

        self.structured = structured
        self.tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder())
        self.num_known = len(self.tokenizer)
        self.vocab_size = self.num_known + 37
        structured.prepare(tokenizer_folder(), self.vocab_size)

    def compile(self, kind: str, value: object = "", **options: Any) -> Grammar:
        text = value if isinstance(value, str) else json.dumps(value)
        return self.structured.compile(StructuredSpec(kind, text, **options))  # type: ignore[arg-type]

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def text(self, ids: list[int]) -> str:
        found: str = self.tokenizer.decode(ids)
        return found

    def allowed(self, state: GrammarState) -> list[int]:
        """The ids whose bits are set."""
        row = torch.zeros(-(-self.vocab_size // 32), dtype=torch.int32)
        state.fill(row)
        bits = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")
        return [int(token) for token in np.flatnonzero(bits[: self.vocab_size])]

    def walk(self, grammar: Grammar, seed: int, most: int = 60) -> tuple[GrammarState, list[int]]:
        """A random answer, as it stands when it ended or became too long."""
        taken: list[int] = []
        dice, state = random.Random(seed), grammar.start()
        while not state.finished and len(taken) < most:
            allowed = self.allowed(state)
            if state.accepting and (not allowed or dice.random() < 0.2):
                break
            assert allowed, f"after {self.text(taken)!r} no token may follow, and the answer may not end"
            token = dice.choice(allowed)
            assert state.advance([token]) == 1, (
                f"{self.text([token])!r} may follow {self.text(taken)!r}, and was not taken"
            )
            taken.append(token)
        return state, taken

    def takes(self, grammar: Grammar, answer: str) -> bool:
        """Whether an answer has the form, whole."""
        state, ids = grammar.start(), self.ids(answer)
        return state.advance(ids) == len(ids) and state.accepting


def refused(compile_: Callable[[], Grammar]) -> str | None:
    """Why a form is refused; None: it is not."""
    try:
        compile_()
    except ValueError as error:
        return str(error)
    return None


Case = tuple[dict[str, Any], str, str]  # a schema, an answer that has its form, one that differs in what it says


def keywords() -> Iterator[Case]:
    """Schemas of one keyword each. Whoever compiles one must tell the two answers apart."""
    text: dict[str, Any] = {"type": "string"}
    numbers: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
    yield {**text, "format": "date"}, '"2024-02-03"', '"tomorrow"'
    yield {**text, "format": "date"}, '"2024-02-29"', '"2023-02-29"'
    yield {**text, "format": "time"}, '"10:00:59Z"', '"10:00:60Z"'
    yield {**text, "format": "date-time"}, '"2024-02-03T10:00:00.5+01:00"', '"2024-02-03T10:00:60Z"'
    yield {**text, "format": "ipv4"}, '"1.2.3.4"', '"1.2.3"'
    yield {**text, "pattern": "^[ab]+c$"}, '"abc"', '"abd"'
    yield {**text, "pattern": "^a(?!b)c?b?$"}, '"ac"', '"ab"'
    yield {**text, "minLength": 2}, '"ab"', '"a"'
    yield {**text, "maxLength": 2}, '"é9"', '"abc"'
    yield {**numbers, "minItems": 2}, "[1,2]", "[1]"
    yield {**numbers, "maxItems": 2}, "[1,2]", "[1,2,3]"
    yield {**numbers, "uniqueItems": True}, "[1,2]", "[1,1]"
    yield {**numbers, "contains": {"const": 1}}, "[2,1]", "[2,2]"
    yield {"type": "integer", "minimum": 3}, "3", "2"
    yield {"type": "integer", "maximum": 3}, "3", "4"
    yield {"type": "number", "exclusiveMinimum": 3}, "3.5", "3"
    yield {"type": "integer", "multipleOf": 3}, "12", "13"
    yield {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}, "2", "12"
    yield {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "true"
    yield {"allOf": [{"type": "integer"}, {"minimum": 3}]}, "3", "2"
    yield {"not": {"type": "integer"}}, "true", "1"
    yield {"if": {"type": "integer"}, "then": {"minimum": 3}}, "3", "2"
    yield {"enum": ["é", 1]}, '"é"', '"e"'
    yield {"const": {"a": [1]}}, '{"a":[1]}', '{"a":[2]}'
    yield {"type": ["integer", "null"]}, "null", '"a"'
    yield {"type": "object", "required": ["é"], "properties": {"é": {"type": "integer"}}}, '{"é":1}', "{}"
    yield {"type": "object", "properties": {"a": {}}, "additionalProperties": False}, '{"a":1}', '{"b":1}'
    yield {"type": "object", "minProperties": 1}, '{"a":1}', "{}"
    yield {"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'
    yield {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"ab":1}', '{"ab":"x"}'
    yield {"type": "object", "propertyNames": {"pattern": "^a"}}, '{"ab":1}', '{"b":1}'
    yield {"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1,"b":1}', '{"a":1}'
    yield {"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x"}, "12", '"12"'
    yield {"$ref": "https://example.com/integer.json"}, "12", '"12"'
    link = {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False}
    yield link, '{"n":{"n":{}}}', '{"n":{"m":1}}'
    yield {"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[1]", "[true]"


BROKEN: tuple[tuple[str, object, str], ...] = (  # kind, value, what the refusal names
    ("json_schema", {"type": "object", "properties": {"a": {"type": "nonsense"}}}, "/properties/a"),
    ("json_schema", {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, ""),
    ("json_schema", {"$ref": "#/$defs/nowhere"}, ""),
    ("json_schema", False, ""),
    ("json_schema", "{", "JSON"),
    ("regex", "(", ""),
    ("choice", [], "choice"),
    ("json_schema", {"type": 7}, ""),
    ("grammar", 'root ::= "a" nowhere', ""),
    ("structural_tag", {"structures": []}, "structures"),
)
