"""A recording as a trace for the eye: open the file at https://ui.perfetto.dev or in chrome://tracing.

    process "engine"    track "steps": one slice a step, its scheduling inside; counters: running, waiting, free blocks,
                        prompt and decode tokens of each step
    process "requests"  one track a request: the whole of it, inside that where its time went, inside that each chunk

The format is the Trace Event Format (JSON): complete slices "X", counters "C", names "M"; times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from turnout.core import Request
from turnout.server.steplog.account import Account
from turnout.server.steplog.events import Added, Event, Finished, Header, Stepped, Stopped, read
from turnout.server.steplog.pieces import DECODE, PREFILL, Piece, Record
from turnout.server.steplog.why import follow

ENGINE, REQUESTS = 1, 2  # process ids
STEPS = 1  # track of the engine

Slice = dict[str, Any]


def export(recording: str | Path, out: str | Path) -> int:
    """Write the trace of a recording to `out`. Returns the number of its events. Raises ValueError for a file that is
    no recording, or a place that can't be written. Memory grows with the requests that are open, not with the file."""
    if Path(out).exists() and Path(out).samefile(recording):
        raise ValueError(f"out={out} is the recording itself; choose another name")
    events = _events(read(recording))
    first, num = next(events), 0  # raises before anything is written
    try:
        with open(out, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            for num, event in enumerate(chain((first,), events), 1):
                file.write(("\n" if num == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise ValueError(f"out={out}: cannot write there: {error.strerror or error}") from error
    except ValueError:
        Path(out).unlink()
        raise
    return num


def _events(events: Iterable[Event]) -> Iterator[Slice]:
    time = _Time()
    tracks = _Tracks(time)
    for event in follow(tracks.chunked(events), tracks.account):
        match event:
            case Header(info):
                yield _name("process_name", ENGINE, 0, f"engine: {info.model}")
                yield _name("process_name", REQUESTS, 0, "requests")
                yield _name("thread_name", ENGINE, STEPS, "steps")
            case Added(request):
                time.of(request.arrived)  # the first one may be the beginning of all
                yield tracks.add(request)
            case Stepped():
                yield from _step(event, time)
            case Stopped(why):
                at = time.of(tracks.account.now)
                yield {
                    "ph": "i",
                    "s": "g",
                    "name": f"the recording stops: {why}",
                    "pid": ENGINE,
                    "tid": STEPS,
                    "ts": at,
                }
        yield from tracks.done()
    yield from tracks.close()


def _step(step: Stepped, time: _Time) -> Iterator[Slice]:
    prompts = [count for _, _, count, _ in step.chunks if count > 1]
    decodes = len(step.chunks) - len(prompts)
    facts = {
        "tokens": sum(prompts) + decodes,
        "requests": len(step.chunks),
        "preempted": [r for r, _ in step.preempted],
    }
    facts |= {"swap_out": step.swap_out, "copies": step.copies, "swap_in": step.swap_in, "reasons": step.reasons}
    name = f"step {step.number}" if step.error is None else f"step {step.number} failed: {step.error}"
    yield time.slice(name, ENGINE, STEPS, step.began, step.ended, facts)
    yield time.slice("schedule", ENGINE, STEPS, step.began, step.scheduled)
    counters = {
        "requests": {"running": step.running, "waiting": step.waiting},
        "free blocks": {"blocks": step.blocks_free},
        "tokens of a step": {"prompt": sum(prompts), "decode": decodes},
    }
    for counter, values in counters.items():
        yield {"ph": "C", "name": counter, "pid": ENGINE, "tid": 0, "ts": time.of(step.ended), "args": values}


class _Tracks:
    """The requests' tracks. A request's slices come out when it has ended, outer ones before inner ones."""

    def __init__(self, time: _Time) -> None:
        self.account = Account(num_ended=0, most_pieces=0, on_piece=self._piece, on_end=self._end)
        self._time = time
        self._tracks: dict[str, tuple[int, list[Slice]]] = {}  # request id -> number, slices; of open requests
        self._num = 0
        self._done: list[Slice] = []

    def add(self, request: Request) -> Slice:
        """Begin a track; its name."""
        self._num += 1
        self._tracks[request.id] = self._num, []
        return _name("thread_name", REQUESTS, self._num, request.labels.get("request", request.id))

    def chunked(self, events: Iterable[Event]) -> Iterator[Event]:
        """The same, each step's chunks noted before the account hears that requests have ended in it. Chunks of more than
        one token are worth a slice."""
        for event in events:
            if isinstance(event, Stepped):
                for request_id, start, count, _ in event.chunks:
                    if count > 1:
                        facts = {"step": event.number, "from": start}
                        self._put(request_id, f"{count} tokens", event.began, event.ended, facts)
            yield event

    def done(self) -> list[Slice]:
        """Slices of the requests that have ended since the last call."""
        found, self._done = self._done, []
        return found

    def close(self) -> list[Slice]:
        """Slices of the rest, up to now."""
        for request_id in list(self.account.open):
            self.account.aborted(request_id, self.account.now, Finished(request_id, "open", 0, 0, 0))
        return self.done()

    def _piece(self, record: Record, piece: Piece, ended: float) -> None:
        facts: dict[str, object] = {"reason": piece.reason} if piece.reason else {}
        if piece.what in (PREFILL, DECODE):
            facts = {"steps": piece.steps, "seconds in steps": piece.in_steps}
        self._put(record.id, piece.what, piece.began, ended, facts)

    def _end(self, record: Record) -> None:
        assert record.ended_at is not None and record.end is not None
        facts = record.end._asdict() | {"prompt tokens": record.num_prompt, "labels": dict(record.labels)}
        self._put(record.id, f"request, {record.end.why}", record.arrived, record.ended_at, facts)
        _, slices = self._tracks.pop(record.id)
        slices.reverse()  # of slices equal in time, the outer ones were put last
        self._done += sorted(slices, key=lambda piece: (piece["ts"], -piece["dur"]))

    def _put(self, request_id: str, name: str, began: float, ended: float, facts: Mapping[str, object]) -> None:
        if request_id in self._tracks:
            number, slices = self._tracks[request_id]
            slices.append(self._time.slice(name, REQUESTS, number, began, ended, facts))


class _Time:
    """Seconds on the engine's clock as microseconds since the recording began, exact to the nanosecond: what ends with
    its parent ends with it in the file too."""

    def __init__(self) -> None:
        self._first: float | None = None

    def of(self, seconds: float) -> float:
        if self._first is None:
            self._first = seconds
        return max(0, round((seconds - self._first) * 1e9)) / 1e3

    def slice(
        self, name: str, process: int, track: int, began: float, ended: float, facts: Mapping[str, object] | None = None
    ) -> Slice:
        start, end = self.of(began), self.of(ended)
        found: Slice = {"ph": "X", "name": name, "pid": process, "tid": track, "ts": start}
        found["dur"] = round(max(0.0, end - start), 3)
        return found | ({"args": dict(facts)} if facts else {})


def _name(what: str, process: int, track: int, name: str) -> Slice:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def load(path: str | Path) -> list[Slice]:
    """The events of a trace, checked as a viewer needs them: every field there, times in order on each track, slices
    of a track one inside or after the other. Raises ValueError naming the event that is wrong."""
    with open(path, encoding="utf-8") as file:
        events: list[Slice] = json.load(file)["traceEvents"]
    open_: dict[tuple[int, int], list[Slice]] = {}
    last: dict[tuple[int, int, str], float] = {}
    for event in events:
        missing = [key for key in ("ph", "name", "pid", "tid") if key not in event]
        kind, track = str(event.get("ph")), (int(event.get("pid", 0)), int(event.get("tid", 0)))
        missing += [key for key in _NEEDS.get(kind, ()) if key not in event]
        if missing or kind not in _NEEDS:
            raise ValueError(f"{event} lacks {', '.join(missing) or 'a known ph'}")
        if kind == "M":
            continue
        lane = (*track, str(event["name"]) if kind == "C" else kind)
        if event["ts"] < last.get(lane, 0.0) or event.get("dur", 0.0) < 0.0:
            raise ValueError(f"{event} goes back in time: its track is at {last.get(lane, 0.0)}")
        last[lane] = event["ts"]
        if kind == "X":
            _nest(open_.setdefault(track, []), event)
    return events


_NEEDS: Mapping[str, tuple[str, ...]] = {"X": ("ts", "dur"), "C": ("ts", "args"), "M": ("args",), "i": ("ts", "s")}


def _nest(outer: list[Slice], event: Slice) -> None:
    """Put a slice into those it lies in."""

    def end(piece: Slice) -> float:
        return float(piece["ts"] + piece["dur"])

    while outer and end(outer[-1]) <= event["ts"] + _GRAIN:
        outer.pop()
    if outer and end(event) > end(outer[-1]) + _GRAIN:
        raise ValueError(f"{event} ends after {outer[-1]}, in which it begins")
    outer.append(event)


_GRAIN = 5e-4  # microseconds; times are whole nanoseconds
