"""The command line of `turnout ab` as what to compare. It composes nothing.

a=[attention=torch] b=[attention=cpu],transformers model=M num_prompts=8
    ─▶  a: an engine of [model=M attention=torch]
        b: an engine of [model=M attention=cpu], transformers on [model=M]
        own: num_prompts=8
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from turnout.lab.ab.config import OWN
from turnout.server.cli.overrides import MANY, Usage
from turnout.server.cli.texts import quoted

FILES = ("workload", "out", "html", "api_key")  # quoted for Hydra where needed
URL_KEYS = ("url", "model", "dtype")
TRUTH = "transformers"
CLOSING = {"[": "]", "{": "}", "(": ")"}


class EngineAsked(NamedTuple):
    """An engine in this process."""

    name: str
    overrides: list[str]


class TruthAsked(NamedTuple):
    """transformers' own model in this process."""

    name: str
    overrides: list[str]


class ServerAsked(NamedTuple):
    """A server that speaks the OpenAI API."""

    name: str
    url: str
    model: str | None  # null: the first it lists
    dtype: str  # "": unknown


Asked = EngineAsked | TruthAsked | ServerAsked


@dataclass(frozen=True)
class Line:
    """A command line, taken apart."""

    a: Asked
    others: list[Asked]
    own: list[str]  # overrides of the comparison
    common: list[str]  # overrides of every side
    flags: list[str] = field(default_factory=list)  # Hydra's


def read(args: list[str]) -> Line:
    """Overrides first, then Hydra's flags. Raises Usage for a side that can't be read."""
    args = [arg for arg in args if arg not in MANY]
    end = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    sides = {"a": "[]", "b": ""}
    own: list[str] = []
    common: list[str] = []
    for arg in args[:end]:
        key, _, value = arg.partition("=")
        if key in sides:
            sides[key] = _bare(value)
            own.append(f"{key}={quoted(_bare(value))}")
        elif key in FILES and not re.match(r"['\"]|null$", value):
            own.append(f"{key}={quoted(value)}")
        else:
            (own if re.split(r"[.@]", key.lstrip("+~"))[0] in OWN else common).append(arg)
    if end < len(args):  # only shown, not run
        return Line(EngineAsked("", common), [], own, common, args[end:])
    if not sides["b"]:
        raise Usage('b has no default: say what to compare with, such as b="[attention=torch]"')
    baseline, *more = [_asked(one, common) for one in split(sides["a"])] or [_asked("[]", common)]
    if more:
        raise Usage(f"a is one baseline, got {len(more) + 1}: {sides['a']}. Give the others to b")
    others = [_asked(one, common) for one in split(sides["b"])]
    if isinstance(baseline, ServerAsked) and all(isinstance(b, ServerAsked) for b in others):
        raise Usage("at least one side must be composed here, or be transformers: its tokenizer cuts the prompts")
    return Line(baseline, others, own, common)


def split(text: str) -> list[str]:
    """The parts between top-level commas. Raises Usage for brackets that don't match, and quotes that don't end."""
    parts, depth, quote = [""], list[str](), ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in CLOSING:
            depth.append(CLOSING[char])
        elif char in CLOSING.values():
            if not depth or depth.pop() != char:
                raise Usage(f"{text!r} has a {char} that closes nothing")
        elif char == "," and not depth:
            parts.append("")
            continue
        parts[-1] += char
    if depth or quote:
        raise Usage(f"{text!r} lacks a {quote or depth[-1]}")
    return [part.strip() for part in parts if part.strip()]


def _asked(text: str, common: list[str]) -> Asked:
    """One side. Brackets may be left out around a single override."""
    whole = text.startswith("[") and text.endswith("]")
    items = [_bare(item) for item in split(text[1:-1] if whole else text)]
    name = " ".join(items) or "the defaults"
    if items and items[0].startswith("url="):
        return _server(items, name)
    truth = bool(items) and items[0] == TRUTH
    overrides = items[1:] if truth else items
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not (equals or key.startswith("~")):
            raise Usage(
                f"{item!r} is no side and no override of one: a side is [KEY=VALUE, …], url=http://…, or {TRUTH}"
            )
        if key.lstrip("+~").partition(".")[0] in OWN:
            raise Usage(f"{key} is of the whole comparison, not of one side: give it outside the brackets")
    kept = [arg for arg in common if _key(arg) not in {_key(item) for item in overrides}]
    return (TruthAsked if truth else EngineAsked)(name, kept + overrides)


def _server(items: list[str], name: str) -> ServerAsked:
    given = dict(item.partition("=")[::2] for item in items)
    if strange := given.keys() - set(URL_KEYS):
        raise Usage(f"a server's side takes {', '.join(URL_KEYS)}, got {', '.join(sorted(strange))}")
    parts = urlsplit(given["url"])
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Usage(f"url must be like http://127.0.0.1:8000, got {given['url']!r}")
    url = given["url"].rstrip("/").removesuffix("/v1")
    return ServerAsked(name, url, given.get("model"), given.get("dtype", ""))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _bare(value: str) -> str:
    """A value without the quotes around all of it."""
    value = value.strip()
    found = re.fullmatch(r"'([^']*)'|\"([^\"]*)\"", value)
    return value if found is None else found.group(1) or found.group(2) or ""
