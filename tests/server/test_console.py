"""What the terminal shows."""

from __future__ import annotations

import json
import shlex

import fake_engine
import pytest

from turnout.server.cli.console import welcome
from turnout.server.cli.progress import Progress, complain


def test_the_welcome_says_what_serves_and_how_to_try_it() -> None:
    text = welcome(fake_engine.INFO, "http://127.0.0.1:8000", name="mine", chats=True, needs_key=False)
    assert text.startswith("Turnout serves mine at http://127.0.0.1:8000\n")
    for part in (
        "Counter in float32 on cpu, context 1000 tokens",
        "scheduler=fcfs",
        "10 blocks × 16 = 160 tokens",
        "up to 8 requests, 64 tokens",
        "fp_fake",
        "counts from zero",
    ):
        assert part in text


def curl_of(text: str) -> list[str]:
    return shlex.split(next(line for line in text.splitlines() if line.strip().startswith("curl")))


def test_its_curl_line_survives_a_shell_whatever_the_models_name() -> None:
    name = '/models/it\'s "mine" é'
    command = curl_of(welcome(fake_engine.INFO, "http://[::1]:80", name=name, chats=True, needs_key=False))
    assert command[1] == "http://[::1]:80/v1/chat/completions"
    body = json.loads(command[command.index("-d") + 1])
    assert body["model"] == name and body["messages"][0]["role"] == "user"


def test_its_python_line_is_python() -> None:
    text = welcome(fake_engine.INFO, "http://h:1", name="it's", chats=False, needs_key=True)
    compile(text.splitlines()[-1].strip().removeprefix("python: "), "welcome", "exec")


def test_a_model_without_a_chat_template_is_tried_with_a_completion_and_a_key_is_asked_for_not_shown() -> None:
    text = welcome(fake_engine.INFO, "http://h:1", name="m", chats=False, needs_key=True)
    command = curl_of(text)
    assert command[1] == "http://h:1/v1/completions"
    assert "prompt" in json.loads(command[command.index("-d") + 1])
    assert "Authorization: Bearer $KEY" in command
    assert "chat.completions" not in text


def test_loading_is_a_line_per_stage_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    loading = Progress()
    for stage, share in (("reading", 0.0), ("weights", 0.1), ("weights", 0.9), ("cache", 1.0)):
        loading(stage, share)
    loading.close()
    assert capsys.readouterr().err == "turnout: reading\nturnout: weights\nturnout: cache\n"


def test_loading_is_a_bar_in_a_terminal_and_gone_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    loading = Progress()
    loading("weights", 0.5)
    loading.close()
    shown = capsys.readouterr().err
    assert "weights" in shown and "━" in shown
    assert shown.endswith("\x1b[2K") or shown.rstrip().endswith("\x1b[2K"), "the bar stayed"


def test_an_exception_without_a_text_is_said_by_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    complain(RuntimeError())
    complain(ValueError("too small"))
    assert capsys.readouterr().err == "turnout: RuntimeError\nturnout: too small\n"
