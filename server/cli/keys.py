"""The keys of a composed configuration: type, default and meaning of each. It knows no command line.

A key's meaning is the comment beside its field, or the string below it.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Key(NamedTuple):
    """One thing that can be set."""

    name: str  # dotted, as on the command line
    kind: str  # its type, as its dataclass writes it
    default: object
    about: str  # "" where its field has no comment


def keys_of(composed: DictConfig, parent: str = "") -> Iterator[Key]:
    """Every key, in the order of the fields; of a component's node, the options."""
    from omegaconf import DictConfig, OmegaConf

    kind = OmegaConf.get_type(composed)
    if kind is None or not dataclasses.is_dataclass(kind):
        return
    about = comments(kind)
    for spec in dataclasses.fields(kind):
        name = f"{parent}.{spec.name}" if parent else spec.name
        value = None if OmegaConf.is_missing(composed, spec.name) else composed[spec.name]
        if isinstance(value, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(value)):
            yield from keys_of(value, name)
        elif str(spec.type) != "Any":
            default = "" if OmegaConf.is_missing(composed, spec.name) else value
            yield Key(name, str(spec.type), default, about.get(spec.name, ""))


@lru_cache(maxsize=256)
def comments(kind: type) -> dict[str, str]:
    """Field -> what the comment beside it says, inherited ones too; empty where there is no source."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if dataclasses.is_dataclass(one):
            found |= _comments_in(one)
    return found


def _comments_in(kind: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
        (node,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    lines = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            beside = [lines[n] for n in range(field.lineno, (field.end_lineno or field.lineno) + 1) if n in lines]
            match after:
                case ast.Expr(ast.Constant(str(text))):
                    beside.append(" ".join(text.split()))
            found[field.target.id] = " ".join(beside)
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no known word is near. Its last part may be all that was written of a key."""
    names = list(known)
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    begun = [name for name in names if len(word) > 3 and name.startswith(word)]
    near = difflib.get_close_matches(word, names, 1, 0.7)
    ending = [last[end] for end in difflib.get_close_matches(word.rpartition(".")[2], last, 1, 0.7)]
    return f"; did you mean {(begun or near or ending)[0]}?" if begun or near or ending else ""
