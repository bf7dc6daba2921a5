"""`turnout replay`, `why`, `trace` on the command line: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from days import record_day

from turnout.lab.record.perfetto import load
from turnout.server.cli.main import main


@pytest.fixture
def day(tmp_path: Path) -> Path:
    path = tmp_path / "day.jsonl"
    record_day(path, 1)
    return path


def turnout(*args: object) -> object:
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return ended.value.code


def test_replay_says_that_every_decision_is_the_same(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert turnout("replay", day) == 0
    assert capsys.readouterr().out.endswith(" steps, 40 requests, every decision the same\n")


def test_replay_fails_with_the_first_difference(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in day.read_text().splitlines()]
    next(line for line in lines if line.get("step") == 5)["waiting"] += 1
    day.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert turnout("replay", day) == 1
    assert "step 5, waiting: recorded " in capsys.readouterr().out


def test_replay_says_when_the_recording_was_cut_at_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.jsonl"
    record_day(path, 1, limit=8000)
    assert turnout("replay", path) == 0
    assert "the recording stops there: record_limit of 8000 bytes is reached" in capsys.readouterr().out


def test_why_prints_the_account_of_a_request(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert turnout("why", day, "client-r5") == 0
    out = capsys.readouterr().out
    assert out.startswith("r5 (client-r5 for its client): ") and "  together: " in out


def test_trace_writes_a_file_that_loads(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert turnout("trace", day) == 0
    assert turnout("trace", day, f"out={day.parent / 'mine.json'}") == 0
    first, second = load(day.with_name("day.trace.json")), load(day.with_name("mine.json"))
    assert first == second
    assert f"mine.json: {len(second)} events" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["replay"], ["replay", "a", "b"], ["why", "a"], ["trace", "a", "b"]])
def test_wrong_arguments_get_the_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert turnout(*args) == 2
    assert f"usage: turnout {args[0]} " in capsys.readouterr().err


def test_help_is_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert turnout("why", "--help") == 0
    assert "turnout why FILE REQUEST_ID" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["replay", "trace"])
def test_a_file_that_is_not_there_or_no_recording_is_said_in_a_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert turnout(command, tmp_path / "nothing") == 2
    assert capsys.readouterr().err.endswith("nothing: No such file or directory\n")
    (tmp_path / "text").write_text("hello\n")
    assert turnout(command, tmp_path / "text") == 2
    assert "line 1 is no line of a recording" in capsys.readouterr().err


def test_a_plugin_that_is_not_installed_is_named(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    day.write_text(day.read_text().replace('"name":"fcfs"', '"name":"theirs"', 1))
    assert turnout("replay", day) == 2
    assert "scheduler=theirs: there is no such choice" in capsys.readouterr().err
