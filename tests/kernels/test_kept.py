"""The compiled library on disk: loaded only where nobody else could have put it, and only whole."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from turnout.kernels import cpu as native
from turnout.kernels.cpu import build, kept

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Path]]:
    """A fresh cache; compiling is copying what this machine has compiled already. The list: what was compiled."""
    ready, compiled = Path(native.library()._name), []

    def copied(tool: str, march: str, target: Path, finish: Callable[[Path], None]) -> None:
        draft = target.with_suffix(".draft")
        shutil.copyfile(ready, draft)
        os.truncate(draft, ready.stat().st_size - kept.DIGEST)
        finish(draft)
        draft.replace(target)
        compiled.append(target)

    monkeypatch.setattr(build, "compile_library", copied)
    monkeypatch.setenv("TURNOUT_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    yield compiled
    monkeypatch.undo()
    native.library.cache_clear()


def test_what_is_kept_is_for_its_owner_alone_and_loaded_again(made: list[Path]) -> None:
    native.library()
    (file,) = made
    assert file.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o777 == 0o700
    native.library.cache_clear()
    native.library()
    assert len(made) == 1


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_library_is_made_anew_and_that_is_said_once(
    damage: str, made: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    native.library()
    file = made[0]
    content = file.read_bytes()
    half = len(content) // 2
    file.unlink()  # the process has the other file mapped
    file.write_bytes(
        {"cut": content[:half], "changed": content[:half] + b"x" + content[half + 1 :], "empty": b""}[damage]
    )
    file.chmod(0o700)
    native.library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native.library().turnout_attend is not None
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is damaged; compiling the native kernels anew"
    ]
    assert len(made) == 2 and kept.is_whole(file)


@pytest.mark.parametrize("place", ["file", "folder", "above"])
def test_a_library_that_others_could_have_written_is_refused(place: str, made: list[Path]) -> None:
    native.library()
    file = made[0]
    where = {"file": file, "folder": file.parent, "above": file.parent.parent}[place]
    where.chmod(0o777)
    native.library.cache_clear()
    with pytest.raises(
        native.NativeError, match=f"are not loaded: {where} can be written to by .*chmod g?o-w.*TURNOUT_CACHE"
    ):
        native.library()
    where.chmod(0o1777 if place == "above" else 0o700)  # sticky, as /tmp is: others can't rename what is there
    assert native.library() is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_library_of_another_user_is_refused(place: str, made: list[Path]) -> None:
    native.library()
    where = made[0] if place == "file" else made[0].parent
    os.chown(where, 12345, -1)
    native.library.cache_clear()
    with pytest.raises(native.NativeError, match="belongs to user 12345, not to you"):
        native.library()


def test_another_version_of_the_compiler_makes_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.kernels()
    monkeypatch.setattr(build, "version", lambda tool: "g++ 99.1")
    assert native.kernels() != before
