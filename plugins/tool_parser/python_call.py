"""Calls written as Python: where one ends, and its keyword arguments as JSON. Nothing is run: values must be literals."""

from __future__ import annotations

import ast
import json
import warnings

from turnout.plugins.tool_parser.source import Broken, Reads, Source

WORDS = {"true": True, "false": False, "null": None}  # as models that think of JSON write them


def expression(source: Source) -> Reads[str]:
    """The text of `name(…)` up to the bracket that closes it. Raises Broken."""
    pieces, depth, quote = [], 0, ""
    while (char := (yield from source.peek())) != "(":
        if not (char.isidentifier() or char.isdigit() or char == "."):
            raise Broken
        pieces.append(char)
        yield from source.take(char)
    while not pieces or pieces[-1] != ")" or depth or quote:
        char = yield from source.peek()
        yield from source.take(char)
        pieces.append(char)
        if quote:
            if char == "\\":
                other = yield from source.peek()
                yield from source.take(other)
                pieces.append(other)
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
    return "".join(pieces).strip()


def keywords(text: str) -> tuple[str, str]:
    """The function's name and its arguments as JSON. Raises Broken for what is no call with literal keywords."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes
            call = ast.parse(text, mode="eval").body
            if not isinstance(call, ast.Call) or call.args or any(pair.arg is None for pair in call.keywords):
                raise Broken
            found = {str(pair.arg): _value(pair.value) for pair in call.keywords}
            return ast.unparse(call.func), _whole(json.dumps(found, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Broken from None


def _whole(text: str) -> str:
    """The text with surrogate pairs, which JSON's escapes make, as characters. Raises ValueError for half a pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        raise Broken
    return node.value
