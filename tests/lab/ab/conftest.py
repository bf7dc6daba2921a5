"""A tiny model with a tokenizer, for every test of the command."""

from __future__ import annotations

import sys

import pytest
from bytewise import save_model
from commands import Ab

from turnout.server.cli import main
from turnout.server.text.tokenizer import Text


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="session")
def text(tiny: str) -> Text:
    return Text.load(tiny)


@pytest.fixture
def ab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: str) -> Ab:
    """Runs the command on the tiny model; its exit code, what it printed and what it complained."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["turnout"])
        with pytest.raises(SystemExit) as end:
            main.main(["ab", f"model={tiny}", *args])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run
