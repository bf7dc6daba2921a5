"""A recording holds what happened, in order, in a file that is bounded; what is wrong with the file never stops the
engine."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from days import composed, engine_of, live, record_day

from turnout.core import Request, Sampling
from turnout.core.hooks import new_hooks
from turnout.server.steplog import record
from turnout.server.steplog.events import Aborted, Added, Dropped, Header, Stepped, Stopped, read
from turnout.server.steplog.record import Recorder


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_begins_with_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    engine = record_day(path)
    first = lines(path)[0]
    assert first["turnout"] == 1 and first["fingerprint"] == "fp_fake"
    assert first["composition"] == composed()
    assert next(read(path)) == Header(engine.info)


def test_a_request_reads_as_it_was_asked(tmp_path: Path) -> None:
    path, hooks = tmp_path / "day.jsonl", new_hooks()
    recorder = Recorder(str(path), 2**20)
    hooks.register(recorder)
    engine, _ = engine_of(composed(), hooks)
    recorder.begin(engine.info)
    sampling = Sampling(
        0.5, top_k=3, logit_bias={7: 1.5}, stop_ids=frozenset((3, 1)), max_tokens=5, min_tokens=2, logprobs=0, seed=9
    )
    asked = Request("é\n", [1, 2, 3], sampling, 0.25, 4, {"tenant": "ü"}, "salt", None, True)
    engine.add(asked)
    recorder.close()
    _, added = read(path)
    assert isinstance(added, Added)
    for name in ("id", "tokens", "sampling", "arrived", "priority", "labels", "salt", "parent", "keep"):
        assert getattr(added.request, name) == getattr(asked, name)


def test_lines_stand_in_the_order_of_events(tmp_path: Path) -> None:
    path, hooks = tmp_path / "day.jsonl", new_hooks()
    recorder = Recorder(str(path), 2**20)
    hooks.register(recorder)
    engine, recorder._clock = engine_of(composed(), hooks)
    recorder.begin(engine.info)
    engine.add(Request("a", [1], Sampling(0, max_tokens=1), keep=True))
    engine.step()
    engine.add(Request("b", [1, 2], Sampling(0, max_tokens=9)))
    engine.drop("a")
    engine.step()
    engine.abort("b")
    engine.abort("nobody")
    recorder.close()
    kinds = [type(event) for event in read(path)]
    assert kinds == [Header, Added, Stepped, Added, Dropped, Stepped, Aborted]


def test_a_step_tells_its_chunks_times_tokens_and_who_ended(tmp_path: Path) -> None:
    path, hooks = tmp_path / "day.jsonl", new_hooks()
    recorder = Recorder(str(path), 2**20)
    hooks.register(recorder)
    engine, _ = engine_of(composed(), hooks)
    recorder.begin(engine.info)
    request = Request("a", [1, 2, 3], Sampling(0, max_tokens=2))
    engine.add(request)
    engine.step()
    engine.step()
    recorder.close()
    first, second = (event for event in read(path) if isinstance(event, Stepped))
    assert (first.number, first.chunks, first.tokens) == (1, [("a", 0, 3, True)], request.tokens[3:4])
    assert (second.number, second.chunks, second.tokens) == (2, [("a", 3, 1, True)], request.tokens[4:5])
    assert first.began < first.scheduled < first.ended < second.began
    assert (first.running, first.finished) == (1, []) and (second.running, second.blocks_free) == (0, 16)
    assert second.finished == [("a", "length", 2, 0, 0)]


def test_at_its_limit_it_stops_with_one_warning_and_says_so_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "day.jsonl"
    record_day(path, limit=5000)
    assert 4000 < path.stat().st_size < 5200
    *_, last = read(path)
    assert last == Stopped("record_limit of 5000 bytes is reached")
    warnings = [r for r in caplog.records if r.name == "turnout.record"]
    assert [r.levelno for r in warnings] == [logging.WARNING] and "the engine goes on" in warnings[0].getMessage()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_on_a_full_disk_it_stops_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    hooks = new_hooks()
    recorder = Recorder("/dev/full", 2**20)
    hooks.register(recorder)
    engine, _ = engine_of(composed(), hooks)
    recorder.begin(engine.info)
    recorder.close()  # the disk was asked, and said no
    recorder._on = True
    live(engine, seed=0, num_requests=5)
    (warning,) = (r for r in caplog.records if r.name == "turnout.record")
    assert "No space left on device" in warning.getMessage()


def test_a_disk_that_is_too_slow_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "BACKLOG", 100)
    record_day(tmp_path / "day.jsonl")
    (warning,) = (r for r in caplog.records if r.name == "turnout.record")
    assert "behind" in warning.getMessage()


@pytest.mark.parametrize("path", ["/no/such/folder/day.jsonl", "/"])
def test_a_place_that_cannot_be_written_is_refused_at_once(path: str) -> None:
    with pytest.raises(ValueError, match=f"record={path}: cannot write there: "):
        Recorder(path, 2**20)


def test_a_file_that_is_no_recording_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_text("precious")
    with pytest.raises(ValueError, match="is no recording; choose another name"):
        Recorder(str(path), 2**20)
    assert path.read_text() == "precious"


def test_a_recording_gives_way_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    record_day(path, 1)
    before = path.read_text()
    record_day(path, 2)
    assert next(read(path)) and path.read_text() != before


@pytest.mark.parametrize("there", [False, True])
def test_nobody_else_may_read_it(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "day.jsonl"
    if there:
        path.write_text('{"turnout": 1}')
        path.chmod(0o644)
    record_day(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_cut_short_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    record_day(path)
    num = len(list(read(path)))
    path.write_text(path.read_text()[:-20])
    assert len(list(read(path))) == num - 1


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: "", "is empty"),
        (lambda text: "hello\n", "line 1 is no line of a recording"),
        (lambda text: text.replace('"turnout":1', '"turnout":9', 1), "version 9, this turnout reads version 1"),
        (lambda text: text.partition("\n")[2], "line 1: a recording begins with its header"),
        (lambda text: text.replace('"chunks":', '"junks":', 1), "is no line of a recording"),
        (lambda text: text.replace("\n", "\n[]\n", 3), "line 2 is no line of a recording"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_naming_the_line(tmp_path: Path, change, fault: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "day.jsonl"
    record_day(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=fault):
        list(read(path))
