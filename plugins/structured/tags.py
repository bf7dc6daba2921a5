"""Structural tags as a grammar in Lark: free text with structures in it, each begun by a trigger. It knows no tokenizer
but its added tokens, which stand for themselves wherever they are spelled out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Tag(NamedTuple):
    """One structure."""

    begin: str
    schema: Mapping[str, Any]
    end: str


class Tags(NamedTuple):
    """What `StructuredSpec.value` holds for a structural tag."""

    structures: tuple[Tag, ...]
    triggers: tuple[str, ...]
    at_least_one: bool
    stop_after_first: bool
    separator: str  # between two structures, where nothing else may stand there


def read(text: str) -> Tags:
    """Raises ValueError naming what is wrong."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the structural tag is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the structural tag must be an object")  # noqa: TRY004 - what a client sent
    if "format" in found:
        raise ValueError(
            "a structural tag with `format` is not supported: send `structures`, each with begin, schema and end, "
            "and `triggers`"
        )
    known = {"type", "structures", "triggers", "at_least_one", "stop_after_first", "separator"}
    if strange := sorted(found.keys() - known):
        raise ValueError(f"the structural tag has {strange[0]!r}, which is not known")
    structures, triggers = found.get("structures"), found.get("triggers", [])
    if not isinstance(structures, list) or not structures:
        raise ValueError("structures must be a list of at least one")
    tags = tuple(_tag(tag, f"structures/{place}") for place, tag in enumerate(structures))
    at_least_one, stop = (bool(found.get(name, False)) for name in ("at_least_one", "stop_after_first"))
    if not at_least_one:
        if not (isinstance(triggers, list) and triggers and all(isinstance(t, str) and t for t in triggers)):
            raise ValueError("triggers must be a list of texts that are not empty")
        for place, tag in enumerate(tags):
            if not any(tag.begin.startswith(trigger) for trigger in triggers):
                raise ValueError(f"structures/{place}/begin must start with one of the triggers")
    return Tags(tags, tuple(triggers), at_least_one, stop, str(found.get("separator", "\n")))


def _tag(tag: object, place: str) -> Tag:
    if not isinstance(tag, dict):
        raise ValueError(f"{place} must be an object")  # noqa: TRY004
    begin, end, schema = tag.get("begin"), tag.get("end", ""), tag.get("schema", {})
    if not (isinstance(begin, str) and begin and isinstance(end, str)):
        raise ValueError(f"{place} must have a begin that is not empty, and an end")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"{place}/schema must be a schema")  # noqa: TRY004
    return Tag(begin, schema, end)


def lark(tags: Tags, added: Mapping[str, int], compact: bool) -> str:
    """The grammar, in the Lark that llguidance reads."""
    rules = [_rule(f"tag_{place}", tag.begin, tag, added, compact) for place, tag in enumerate(tags.structures)]
    names = " | ".join(f"tag_{place}" for place in range(len(tags.structures)))
    if tags.at_least_one:
        more = "" if tags.stop_after_first else f" ({_text(tags.separator, added)} tag)*"
        return "\n".join([f"start: tag{more}", f"tag: {names}", *rules])
    rules, groups = [], []
    for place, trigger in enumerate(tags.triggers):
        own = [tag for tag in tags.structures if tag.begin.startswith(trigger)]
        if not own:
            continue
        bodies = [f"tag_{place}_{number}" for number in range(len(own))]
        rules += [
            _rule(name, tag.begin[len(trigger) :], tag, added, compact) for name, tag in zip(bodies, own, strict=True)
        ]
        if trigger in added:
            rules.append(f"tag_{place}: TEXT {_text(trigger, added)} ({' | '.join(bodies)})")
        else:
            rules.append(f"tag_{place}_begun[lazy]: TEXT {json.dumps(trigger)}")
            rules.append(f"tag_{place}: tag_{place}_begun ({' | '.join(bodies)})")
        groups.append(f"tag_{place}")
    tail = f"start: ({' | '.join(groups)}) | rest" if tags.stop_after_first else f"start: ({' | '.join(groups)})* rest"
    return "\n".join([tail, "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _rule(name: str, begin: str, tag: Tag, added: Mapping[str, int], compact: bool) -> str:
    schema = {**tag.schema, "x-guidance": {"whitespace_flexible": not compact}}
    return f"{name}: {_text(begin, added)} %json {json.dumps(schema)} {_text(tag.end, added)}"


def _text(text: str, added: Mapping[str, int]) -> str:
    """A text as Lark spells it; an added token is its number."""
    if not added:
        return json.dumps(text) if text else ""
    found = re.split("(" + "|".join(map(re.escape, sorted(added, key=len, reverse=True))) + ")", text)
    return " ".join(f"<[{added[piece]}]>" if piece in added else json.dumps(piece) for piece in found if piece)
