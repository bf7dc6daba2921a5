"""A recording becomes a trace that a viewer can load: every slice in its place, nothing missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from days import accounts, record_day

from turnout.lab.record.perfetto import ENGINE, REQUESTS, export, load
from turnout.server.steplog.events import Added, Stepped, read


@pytest.fixture
def day(tmp_path: Path) -> Path:
    path = tmp_path / "day.jsonl"
    record_day(path, 1, scheduler="chunked_prefill", preemption="swap")
    return path


@pytest.fixture
def events(day: Path) -> list[dict[str, Any]]:
    """Loaded by the reader that checks fields, order and nesting."""
    out = day.with_suffix(".trace.json")
    num = export(day, out)
    found = load(out)
    assert len(found) == num
    return found


def tracks(events: list[dict[str, Any]]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == REQUESTS}


def test_every_request_has_a_track_under_the_name_its_client_knows(day: Path, events: list[dict[str, Any]]) -> None:
    asked = [f"client-{event.request.id}" for event in read(day) if isinstance(event, Added)]
    assert list(tracks(events).values()) == asked


def test_a_requests_track_is_its_account(day: Path, events: list[dict[str, Any]]) -> None:
    names, told = tracks(events), accounts(day)
    for number, name in names.items():
        account = told[name.removeprefix("client-")]
        mine = [e for e in events if (e["pid"], e["tid"], e["ph"]) == (REQUESTS, number, "X")]
        whole, *inner = mine
        assert whole["name"] == f"request, {account['state']}"
        assert whole["dur"] == pytest.approx(account["seconds"] * 1e6, abs=0.01)  # type: ignore[operator]
        pieces = account["pieces"]
        assert isinstance(pieces, list)
        slices = [e for e in inner if not e["name"].endswith(" tokens")]
        assert [e["name"] for e in slices] == [piece["what"] for piece in pieces]
        assert sum(e["dur"] for e in slices) == pytest.approx(whole["dur"], abs=0.01 * len(pieces))


def test_prompts_are_shown_chunk_by_chunk(day: Path, events: list[dict[str, Any]]) -> None:
    chunks = [e for e in events if e["pid"] == REQUESTS and e["name"].endswith(" tokens")]
    steps = [event for event in read(day) if isinstance(event, Stepped)]
    assert len(chunks) == sum(count > 1 for step in steps for _, _, count, _ in step.chunks)


def test_steps_and_counters_are_those_of_the_recording(day: Path, events: list[dict[str, Any]]) -> None:
    steps = [event for event in read(day) if isinstance(event, Stepped)]
    engine = [e for e in events if e["pid"] == ENGINE]
    assert len([e for e in engine if e["name"].startswith("step ")]) == len(steps)
    assert len([e for e in engine if e["name"] == "schedule"]) == len(steps)
    counted = {name: [e["args"] for e in engine if e["name"] == name] for name in ("requests", "free blocks")}
    assert counted["requests"] == [{"running": step.running, "waiting": step.waiting} for step in steps]
    assert counted["free blocks"] == [{"blocks": step.blocks_free} for step in steps]
    computed = [e["args"] for e in engine if e["name"] == "tokens of a step"]
    assert [sum(values.values()) for values in computed] == [sum(c[2] for c in step.chunks) for step in steps]


def test_a_preempted_request_shows_it(events: list[dict[str, Any]]) -> None:
    assert any(e["name"] == "preempted (swap)" for e in events)


def test_requests_that_are_open_at_the_end_of_a_recording_are_shown_up_to_there(tmp_path: Path) -> None:
    path, out = tmp_path / "day.jsonl", tmp_path / "out.json"
    record_day(path, 1, limit=8000)
    export(path, out)
    found = load(out)
    assert any(e["name"] == "request, open" for e in found)
    (stop,) = (e for e in found if e["ph"] == "i")
    assert stop["name"].startswith("the recording stops: record_limit")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda event: event.pop("dur"), "lacks dur"),
        (lambda event: event.update(ph="Q"), "lacks a known ph"),
        (lambda event: event.update(dur=-1.0), "goes back in time"),
        (lambda event: event.update(dur=1e12), "ends after"),
    ],
)
def test_the_reader_refuses_what_a_viewer_would_show_wrong(day: Path, change: Any, fault: str) -> None:
    out = day.with_suffix(".trace.json")
    export(day, out)
    trace = json.loads(out.read_text())
    inner = [e for e in trace["traceEvents"] if e["pid"] == REQUESTS and e["ph"] == "X" and e["name"] == "prefill"]
    change(inner[0])
    out.write_text(json.dumps(trace))
    with pytest.raises(ValueError, match=fault):
        load(out)


def test_a_recording_is_never_overwritten_by_its_trace(day: Path) -> None:
    before = day.read_bytes()
    with pytest.raises(ValueError, match="is the recording itself"):
        export(day, day)
    assert day.read_bytes() == before


def test_nothing_is_written_for_a_file_that_is_no_recording(tmp_path: Path) -> None:
    path, out = tmp_path / "day.jsonl", tmp_path / "out.json"
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="no line of a recording"):
        export(path, out)
    assert not out.exists()
    record_day(path.with_name("good.jsonl"))
    with pytest.raises(ValueError, match="cannot write there"):
        export(path.with_name("good.jsonl"), tmp_path / "no" / "out.json")
