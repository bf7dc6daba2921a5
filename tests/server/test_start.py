"""The program before and beside its work: streams that are closed or full, Ctrl-C at any moment, a wrong log level."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from turnout.server.cli.unfailing import Unfailing

START = [sys.executable, "-P", "-c"]


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*START, code], check=False, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


OPEN = "from turnout.server.cli.start import open_closed_streams; open_closed_streams(); "


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_are_opened_on_nothing_so_that_no_other_file_takes_their_number(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    out = tmp_path / "out"
    code = (
        "import os, sys; "
        + "".join(f"os.close({fd}); " for fd in closed)
        + OPEN
        + f"fd = os.open({str(out)!r}, os.O_CREAT | os.O_WRONLY); "
        "print('x', flush=True); print('x', file=sys.stderr, flush=True); os.write(fd, str(fd).encode())"
    )
    made = run(code, capture_output=True)
    assert made.returncode == 0 and int(out.read_text()) > 2, made.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_a_full_disk_does_not_take_is_lost_and_nothing_else_happens() -> None:
    code = (
        "import sys; from turnout.server.cli.unfailing import Unfailing; sys.stdout = Unfailing(sys.stdout); "
        "[print('line', flush=True) for _ in range(3)]; print('alive', file=sys.stderr)"
    )
    with open("/dev/full", "w") as full:
        made = run(code, stdout=full, stderr=subprocess.PIPE)
    assert (made.returncode, made.stderr) == (0, "alive\n")


def test_a_stream_that_takes_text_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Unfailing(sys.stdout)
    print("text", file=stream, flush=True)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "text\n" and stream.isatty() is False  # type: ignore[operator]


def test_a_reader_that_is_gone_raises_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as file:
        stream = Unfailing(file)
        for _ in range(2):
            print("text", file=stream, flush=True)  # type: ignore[arg-type]


INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize("when", ["while it is imported", "while it runs"])
def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path, when: str) -> None:
    """A module of the command's own name stands for it: what is interrupted is small, and at a known place."""
    body = f"{INTERRUPT}\n" if "imported" in when else f"def main():\n    {INTERRUPT}\n    while True: pass\n"
    (tmp_path / "heavy.py").write_text(body)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import importlib.abc, importlib.util\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == 'turnout.server.cli.main':\n"
        f"            return importlib.util.spec_from_file_location(name, {str(tmp_path / 'heavy.py')!r})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from turnout.server.cli.start import main; main()"
    )
    made = run(code, capture_output=True)
    assert made.stderr == "" and made.returncode in (130, -signal.SIGINT)


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys, types; "
        "sys.modules['turnout.server.cli.main'] = types.SimpleNamespace(main=lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)); "
        "from turnout.server.cli.start import main; main()"
    )
    assert run(code, capture_output=True).stdout == "True\n"


def test_a_log_level_that_there_is_none_of_is_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from turnout.server.cli.main import main

    monkeypatch.setenv("TURNOUT_LOG", "verbose")
    with pytest.raises(SystemExit) as exit_:
        main(["serve"])
    assert exit_.value.code == 2
    assert "TURNOUT_LOG must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL, got 'verbose'" in capsys.readouterr().err
