"""Forms of answers by xgrammar (https://github.com/mlc-ai/xgrammar): a pushdown automaton whose masks are mostly computed
when it is compiled. It drops keywords of a schema that it does not implement, so `xgrammar_schema` looks first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from torch import Tensor

from turnout.core import ModelError
from turnout.core.structured import StructuredSpec
from turnout.plugins.structured import schema, tags
from turnout.plugins.structured.state import State
from turnout.plugins.structured.vocabulary import Vocabulary
from turnout.plugins.structured.xgrammar_schema import UNREAD, refusal


@dataclass
class XGrammar:
    """Takes longer to compile, and fewer schemas; its masks take a few microseconds."""

    auto_rank: ClassVar[float] = 1.0

    @staticmethod
    def obstacle() -> str | None:
        missing = [name for name in ("xgrammar", "tvm_ffi") if not find_spec(name)]
        return f"{missing[0]} is not installed: pip install 'turnout[xgrammar]'" if missing else None

    def prepare(self, path: str, vocab_size: int) -> None:
        import xgrammar

        self._vocabulary = vocabulary = Vocabulary(path, vocab_size)
        ends = sorted(vocabulary.end_ids) or None
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                vocabulary.tokenizer, vocab_size=vocab_size, stop_token_ids=ends
            )
        except Exception as error:  # its own kinds; a tokenizer it can't read
            raise ModelError(
                f"xgrammar can't read this tokenizer: {error}; choose structured=llguidance or structured=none"
            ) from error
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        decoded = info.decoded_vocab
        vocabulary.find_bytes = lambda token: decoded[token] if token < len(decoded) else b""

    def compile(self, spec: StructuredSpec) -> XGGrammar:
        try:
            return XGGrammar(self._compiled(spec), self._vocabulary, spec.after.encode())
        except RuntimeError as error:  # its own kinds are of this one; the first line names its source file
            raise ValueError(re.sub(r"^\[[^]]*\] \S+: ", "", str(error)).strip()) from None

    def _compiled(self, spec: StructuredSpec) -> Any:
        compiler, compact = self._compiler, spec.whitespace == "compact"
        if spec.kind in ("json_schema", "json_object"):
            asked = schema.read(spec.value) if spec.kind == "json_schema" else {"type": "object"}
            if (why := refusal(asked)) is not None:
                raise ValueError(f"the schema can't be enforced at #{why[0]}: {why[1]}")
            separators = (",", ":")
            return compiler.compile_json_schema(
                json.dumps(asked), any_whitespace=not compact, separators=separators, strict_mode=False
            )
        if spec.kind == "choice":
            return compiler.compile_grammar("root ::= " + " | ".join(map(json.dumps, schema.choices(spec.value))))
        if spec.kind == "regex":
            if UNREAD.search(spec.value):
                raise ValueError(
                    "structured=xgrammar reads no look-around, word border or back-reference in an expression"
                )
            return compiler.compile_regex(spec.value)
        if spec.kind == "structural_tag":
            return self._tagged(tags.read(spec.value), compact)
        return self._written(compiler, spec.value)

    def _tagged(self, read: tags.Tags, compact: bool) -> Any:
        for place, tag in enumerate(read.structures):
            if (why := refusal(tag.schema)) is not None:
                raise ValueError(f"the schema can't be enforced at #/structures/{place}/schema{why[0]}: {why[1]}")
        if not read.at_least_one:
            raise ValueError("structural tags in free text are served by structured=llguidance only")
        return self._compiler.compile_lark(tags.lark(read, self._vocabulary.added, compact))

    @staticmethod
    def _written(compiler: Any, text: str) -> Any:
        """GBNF has a rule root; what has none is Lark."""
        compile_: Callable[[str], Any] = compiler.compile_grammar if "::=" in text else compiler.compile_lark
        return compile_(text)


class XGGrammar:
    """A Grammar."""

    def __init__(self, compiled: Any, vocabulary: Vocabulary, after: bytes) -> None:
        import xgrammar

        self._matcher, self._vocabulary, self._after = XGState(xgrammar.GrammarMatcher(compiled)), vocabulary, after

    def start(self) -> State:
        return State(self._matcher, self._vocabulary, self._after)


class XGState:
    """A Matcher over a GrammarMatcher."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def take(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def back(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fork(self) -> XGState:
        return XGState(self._matcher.fork())

    def accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    def fill(self, row: Tensor) -> None:
        row.fill_(-1)
        self._matcher.fill_next_token_bitmask(row[None], 0)
