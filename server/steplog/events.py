"""The lines of a recording: what happened to an engine, in the order it happened. It knows no engine and no file's end.

{"turnout": 1, "info": {...}, "composition": {...}, "fingerprint": "fp_..."}          first line
{"add": {"id": ..., "tokens": [...], "max_tokens": ..., "arrived": ..., ...}}         a request was accepted
{"abort": id, "at": seconds}      {"drop": id}      {"end": why the recording stops early}
{"step": n, "began": ..., "scheduled": ..., "ended": ..., "chunks": [[id, start, num_tokens, samples], ...], ...}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from turnout.core.types import EngineInfo, Request, Sampling

VERSION = 1


class Header(NamedTuple):
    """What was recorded."""

    info: EngineInfo


class Added(NamedTuple):
    """A request as it was when the engine took it."""

    request: Request


class Aborted(NamedTuple):
    request_id: str
    at: float  # seconds on the engine's clock


class Dropped(NamedTuple):
    """What a finished request kept was given back."""

    request_id: str


class Finished(NamedTuple):
    """A request that ended in a step."""

    request_id: str
    why: str  # a Finish value
    num_generated: int
    num_cached: int
    num_preemptions: int


class Stepped(NamedTuple):
    """A step that was computed, or failed."""

    number: int
    began: float  # seconds on the engine's clock
    scheduled: float
    ended: float
    chunks: list[tuple[str, int, int, bool]]  # request id, start, number of tokens, whether it samples
    preempted: list[tuple[str, str]]  # request id, "recompute" or "swap"
    swap_out: int  # blocks
    copies: int
    swap_in: int
    tokens: list[int]  # one per chunk that samples, in order
    reasons: dict[str, str]
    waiting: int
    running: int
    blocks_free: int
    error: str | None  # why the whole step failed
    finished: list[Finished]


class Stopped(NamedTuple):
    """The recording stopped while the engine went on."""

    why: str


Event = Header | Added | Aborted | Dropped | Stepped | Stopped

dumps = json.JSONEncoder(separators=(",", ":")).encode


def header_line(info: EngineInfo) -> str:
    facts = dataclasses.asdict(info)
    composition, fingerprint = facts.pop("composition"), facts.pop("fingerprint")
    line = {"turnout": VERSION, "info": facts, "composition": composition, "fingerprint": fingerprint}
    return json.dumps(line, separators=(",", ":"), default=str) + "\n"


def added_line(request: Request) -> str:
    """Of a request that has not run yet."""
    values: dict[str, object] = {"id": request.id, "tokens": request.tokens, "max_tokens": request.sampling.max_tokens}
    values |= {name: getattr(request, name) for name in ("arrived", "priority", "salt", "parent", "keep")}
    values |= {"labels": dict(request.labels), "sampling": _changed(request.sampling)}
    return dumps({"add": values}) + "\n"


def step_line(step: Stepped) -> str:
    values = step._asdict()
    line = {"step": values.pop("number")} | values
    if step.error is None:
        del line["error"]
    return dumps(line) + "\n"


def _changed(sampling: Sampling) -> dict[str, object]:
    """What differs from the defaults, `max_tokens` apart."""
    changed = {}
    for spec in dataclasses.fields(Sampling):
        value = getattr(sampling, spec.name)
        if spec.init and spec.name not in ("max_tokens", "stop_ids", "logit_bias") and value != spec.default:
            changed[spec.name] = value
    if sampling.stop_ids:
        changed["stop_ids"] = sorted(sampling.stop_ids)
    if sampling.logit_bias:
        changed["logit_bias"] = list(sampling.logit_bias.items())
    return changed


def read(path: str | Path) -> Iterator[Event]:
    """The events of a recording, one at a time; a last line cut short is left out.

    Raises ValueError for a file that is no recording, or not of this version, or damaged, naming the line.
    """
    with open(path, encoding="utf-8") as file:
        yield from parse(file, str(path))


def parse(lines: Iterable[str], name: str) -> Iterator[Event]:
    """As `read`, of lines that lie elsewhere."""
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            event = _event(json.loads(line))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            if not line.endswith("\n") and number > 1:
                return  # the process was ended while it wrote
            raise ValueError(
                f"{name} line {number} is no line of a recording made with record=FILE: {type(error).__name__}: {error}"
            ) from error
        if (number == 1) != isinstance(event, Header):
            raise ValueError(
                f"{name} line {number}: a recording begins with its header and has one, as record=FILE writes"
            )
        yield event
    if not number:
        raise ValueError(f"{name} is empty: a recording begins with its header, as record=FILE writes")


def _event(values: Mapping[str, Any]) -> Event:
    match values:
        case {"step": _}:
            return _stepped(values)
        case {"add": added}:
            return Added(_request(added))
        case {"abort": request_id, "at": at}:
            return Aborted(request_id, at)
        case {"drop": request_id}:
            return Dropped(request_id)
        case {"end": why}:
            return Stopped(why)
        case {"turnout": version, "info": info, "composition": composition, "fingerprint": fingerprint}:
            if version != VERSION:
                raise ValueError(f"it is of version {version}, this turnout reads version {VERSION}")
            facts = info | {"notes": tuple(info.get("notes", ()))}
            return Header(EngineInfo(**facts, composition=composition, fingerprint=fingerprint))
    raise ValueError(f"it has the keys {', '.join(values)}")


def _stepped(v: Mapping[str, Any]) -> Stepped:
    return Stepped(
        v["step"],
        v["began"],
        v["scheduled"],
        v["ended"],
        [(rid, start, count, bool(samples)) for rid, start, count, samples in v["chunks"]],
        [(rid, how) for rid, how in v["preempted"]],
        v["swap_out"],
        v["copies"],
        v["swap_in"],
        v["tokens"],
        v["reasons"],
        v["waiting"],
        v["running"],
        v["blocks_free"],
        v.get("error"),
        [Finished(*fields) for fields in v["finished"]],
    )


def _request(v: Mapping[str, Any]) -> Request:
    options = dict(v.get("sampling", {}))
    options["stop_ids"] = frozenset(options.get("stop_ids", ()))
    options["logit_bias"] = dict(options.get("logit_bias", ()))
    return Request(
        v["id"],
        list(v["tokens"]),
        Sampling(**options, max_tokens=v["max_tokens"]),
        arrived=v["arrived"],
        priority=v.get("priority", 0),
        labels=v.get("labels") or {},
        salt=v.get("salt"),
        parent=v.get("parent"),
        keep=v.get("keep", False),
    )
