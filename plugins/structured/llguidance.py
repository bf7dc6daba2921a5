"""Forms of answers by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over derivatives of
regular expressions, whose masks are computed as they are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from torch import Tensor

from turnout.core import ModelError
from turnout.core.structured import StructuredSpec
from turnout.plugins.structured import schema, tags
from turnout.plugins.structured.state import State
from turnout.plugins.structured.vocabulary import Vocabulary

STRICT = {"lenient": False, "coerce_one_of": False}  # a keyword it does not implement is refused, not dropped

# What its formats let through: 29 February in any year, a second 60 at any time (RFC 3339 has it at the end of a day).
DAY = (
    r"^(([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
    r"|[0-9]{4}-(02-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-9]{2}))"
)
SECOND = ":[0-9]{2}:[0-5][0-9]([^0-9]|$)"
NARROWER = {"date": (DAY,), "time": (SECOND,), "date-time": (DAY, SECOND)}


@dataclass
class LLGuidance:
    """Compiles in about a millisecond and refuses whatever part of a schema it would not enforce."""

    auto_rank: ClassVar[float] = 2.0

    @staticmethod
    def obstacle() -> str | None:
        return None if find_spec("llguidance") else "llguidance is not installed: pip install 'turnout[structured]'"

    def prepare(self, path: str, vocab_size: int) -> None:
        import llguidance.hf

        self._vocabulary = vocabulary = Vocabulary(path, vocab_size)
        ends = sorted(vocabulary.end_ids) or None
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(vocabulary.tokenizer, n_vocab=vocab_size, eos_token=ends)
        except Exception as error:  # its own kinds; a tokenizer it can't read
            raise ModelError(
                f"llguidance can't read this tokenizer: {error}; choose structured=xgrammar or structured=none"
            ) from error
        vocabulary.find_bytes = lambda token: self._tokenizer.decode_bytes([token])

    def compile(self, spec: StructuredSpec) -> LLGrammar:
        from llguidance import LLMatcher, grammar_from

        compact = spec.whitespace == "compact"
        if spec.kind in ("json_schema", "json_object"):
            asked = schema.read(spec.value) if spec.kind == "json_schema" else {"type": "object"}
            text = self._json(asked, compact)
        elif spec.kind == "choice":
            text = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, schema.choices(spec.value))))
        elif spec.kind == "structural_tag":
            read = tags.read(spec.value)
            for place, tag in enumerate(read.structures):
                self._json(tag.schema, compact, f"/structures/{place}/schema")
            text = LLMatcher.grammar_from_lark(tags.lark(read, self._vocabulary.added, compact))
        elif spec.kind == "regex":
            text = LLMatcher.grammar_from_regex(spec.value)
        else:
            text = grammar_from("grammar", spec.value)
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(_shortened(matcher.get_error()))
        return LLGrammar(matcher, self._vocabulary, spec.after.encode())

    def _json(self, asked: Mapping[str, Any], compact: bool, place: str = "") -> str:
        """The grammar of a schema. Raises ValueError with the path of what can't be enforced."""
        from llguidance import LLMatcher

        options: Any = {**STRICT, "whitespace_flexible": not compact}

        def made(part: Mapping[str, Any]) -> str:
            return LLMatcher.grammar_from_json_schema(schema.changed(part, _narrow), overrides=options)

        def fails(part: Mapping[str, Any]) -> str:
            return LLMatcher.validate_grammar(made(part), self._tokenizer)

        found = schema.fault(asked, fails)
        if found is not None:
            raise ValueError(f"the schema can't be enforced at #{place}{found[0]}: {_shortened(found[1])}")
        return made(asked)


class LLGrammar:
    """A Grammar."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, after: bytes) -> None:
        self._matcher, self._vocabulary, self._after = LLState(matcher), vocabulary, after

    def start(self) -> State:
        return State(self._matcher, self._vocabulary, self._after)


class LLState:
    """A Matcher over an LLMatcher, which is in an error state for good once it was given a wrong token."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def take(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def back(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fork(self) -> LLState:
        return LLState(self._matcher.deep_copy())

    def accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def fill(self, row: Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * 4)
        if self._matcher.is_error():
            raise RuntimeError(_shortened(self._matcher.get_error()))


def _narrow(part: dict[str, Any]) -> None:
    if isinstance(part.get("format"), str) and (patterns := NARROWER.get(part["format"])):
        others = part["allOf"] if isinstance(part.get("allOf"), list) else []
        part["allOf"] = [*others, *({"pattern": pattern} for pattern in patterns)]


def _shortened(error: str) -> str:
    return " ".join(error.split())[:400]
