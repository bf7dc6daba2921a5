"""What every command that composes an engine has in common: flags that show or are refused, and folders of presets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from grids import every

from turnout.server.cli import main

COMMANDS = {  # what each is called with at the least, and its code for a wrong command line
    "simulate": (["workload.num_requests=3", "latency=constant", "blocks.num_blocks=400"], 2),
    "bench": ([], 2),
    "tune": ([], 2),
    "ab": (["b=[]"], 64),
}


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["turnout"])
    try:
        main.main(list(args))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nlimits:\n  max_num_seqs: 7\n")
    return tmp_path


@every("command", COMMANDS)
@pytest.mark.parametrize(
    ("flag", "complaint"),
    [(["--run"], "nothing was done"), (["--resolve"], "--resolve"), (["--package", "a"], "--package")],
)
def test_a_flag_that_shows_nothing_is_refused_and_never_looks_like_success(
    command: str, flag: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, wrong = COMMANDS[command]
    assert call(monkeypatch, command, *args, *flag) == wrong
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("command", [*COMMANDS, "serve", "generate"])
def test_a_folder_of_presets_is_taken_by_every_command(
    command: str, presets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = COMMANDS[command][0] if command in COMMANDS else []
    folder = ["--config-dir", str(presets)]
    assert call(monkeypatch, command, *args, *folder, "experiment=mine", "--cfg", "job") == 0
    assert "max_num_seqs: 7" in capsys.readouterr().out


@pytest.mark.parametrize("command", [*COMMANDS, "serve", "generate"])
def test_a_folder_that_is_not_there_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, wrong = COMMANDS.get(command, ([], 2))
    assert call(monkeypatch, command, *args, "--config-dir", "/no/folder") == wrong
    assert "there is no such folder" in capsys.readouterr().err


def test_a_simulation_runs_with_a_preset_of_that_folder(
    presets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--config-dir", str(presets)]
    assert call(monkeypatch, "simulate", *COMMANDS["simulate"][0], *folder, "experiment=mine") == 0
    assert "wall time" in capsys.readouterr().out
