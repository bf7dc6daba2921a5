"""The contract of a format as a suite to inherit. It knows no kind of file.

    class TestMine(FormatContract):
        make = Mine
        example = "fixtures/tiny.mine"

`turnout plugins check format=mine` runs what needs no example.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest

GARBAGE = {"an empty file": b"", "zeros": bytes(4096), "text": b"{}\n" * 99, "the beginning alone": b"GGUF\x03\0\0\0"}


class FormatContract:
    """What every format keeps. `make` builds one; `example` is a small file of its kind."""

    make: Callable[[], Any]
    example: str | Path | None = None

    def test_its_version_is_a_number(self) -> None:
        version = self.make().version
        assert isinstance(version, int), f"version is {version!r}"

    def test_what_is_no_file_of_its_kind_is_refused_with_a_reason(self) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            for what, content in GARBAGE.items():
                file, folder = Path(scratch) / "model", Path(scratch) / what
                file.write_bytes(content)
                folder.mkdir()
                try:
                    self.make().convert(file, folder, lambda stage: None)
                except ValueError as error:
                    assert str(error).strip(), f"{what} is refused without a reason"
                else:
                    raise AssertionError(f"{what} is taken for a model")
                assert file.read_bytes() == content, "it writes into the file"

    def test_an_example_becomes_the_same_folder_each_time(self) -> None:
        if self.example is None:
            raise SkipTest("there is no example; inherit FormatContract and name one")
        before, made = Path(self.example).read_bytes(), []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as scratch:
                self.make().convert(Path(self.example), Path(scratch), lambda stage: None)
                made.append({file.name: file.read_bytes() for file in Path(scratch).iterdir()})
        assert made[0] == made[1], "the same file gives two folders that differ"
        assert Path(self.example).read_bytes() == before, "it writes into the file"
        assert json.loads(made[0].get("config.json", b"{}")), "the folder has no config.json"
        assert any(name.endswith(".safetensors") for name in made[0]), "the folder has no weights"
