"""The table of faults keeps its word: every row names its source and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "faults.md"
HEAD = ["source", "fault", "what Turnout does", "test"]
SOURCE = re.compile(r"`[\w.\-/]+ ?(?:PR)?#\d+`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::((?:\w+::)?test_\w+)`")


class Row(NamedTuple):
    line: int
    cells: list[str]


def rows() -> list[Row]:
    """The rows of every table of the page, their heads and rules left out."""
    found = []
    for number, line in enumerate(TABLE.read_text().splitlines(), start=1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("|") and cells != HEAD and not set(line) <= set("|-: "):
            found.append(Row(number, cells))
    return found


@cache
def names_in(path: str) -> frozenset[str]:
    """The tests a file defines: `test_x`, and `TestY::test_x` too where it stands in a class."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {*inner, *(f"{node.name}::{name}" for name in inner)}
    return frozenset(name for name in names if name.rpartition("::")[2].startswith("test_"))


def test_there_is_a_table_in_every_section() -> None:
    page = TABLE.read_text()
    assert len(rows()) > 40
    for section in page.split("\n## ")[1:]:
        assert f"| {' | '.join(HEAD)} |\n|" in section, section.splitlines()[0]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"line {row.line}")
def test_a_row_names_its_source_and_tests_that_exist(row: Row) -> None:
    assert len(row.cells) == len(HEAD) and all(row.cells), f"a row has four cells, none empty: {row.cells}"
    source, *_, tests = row.cells
    assert SOURCE.search(source), f"no public source such as `project#12` or `project PR#12`: {source}"
    named = TEST.findall(tests)
    assert named and "::" not in TEST.sub("", tests), f"tests are written `tests/FILE.py::test_name`: {tests}"
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert name in names_in(path), f"{path} has no {name}"
