"""The table of faults keeps its word: every row names its source and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "faults.md"
HEAD = ["source", "fault", "what Turnout does", "test"]
SOURCE = re.compile(r"`[\w.\-/]+ ?(?:PR)?#\d+`|^tried: .")  # a public report, or a trial of our own
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
def defined_in(path: str) -> dict[str, bool]:
    """The tests a file defines, and whether each is quick: `test_x`, and `TestY::test_x` too where it is in a class."""
    body = ast.parse((ROOT / path).read_text()).body
    quick = not any(isinstance(node, ast.Assign) and _is_slow(node) for node in body)
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = quick and not _is_slow(*node.decorator_list)
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    fast = quick and not _is_slow(*node.decorator_list, *inner.decorator_list)
                    found |= dict.fromkeys((inner.name, f"{node.name}::{inner.name}"), fast)
    return found


def _is_slow(*nodes: ast.AST) -> bool:
    """Whether one of these is the mark itself, alone or in a list: a parameter that is slow leaves others."""
    values = [node.value if isinstance(node, ast.Assign) else node for node in nodes]
    return any("pytest.mark.slow" in map(ast.unparse, getattr(value, "elts", [value])) for value in values)


def test_there_is_a_table_in_every_section() -> None:
    page = TABLE.read_text()
    assert len(rows()) > 40
    for section in page.split("\n## ")[1:]:
        assert f"| {' | '.join(HEAD)} |\n|" in section, section.splitlines()[0]


def test_every_row_names_its_source_and_tests_that_exist() -> None:
    for row in rows():
        at = f"line {row.line}"
        assert len(row.cells) == len(HEAD) and all(row.cells), f"{at}: a row has four cells, none empty: {row.cells}"
        source, *_, tests = row.cells
        assert SOURCE.search(source), f"{at}: no public source such as `project#12` or `project PR#12`: {source}"
        named = TEST.findall(tests)
        assert named and "::" not in TEST.sub("", tests), f"{at}: tests are written `tests/FILE.py::test_name`: {tests}"
        for path, name in named:
            assert (ROOT / path).is_file(), f"{at}: {path}"
            assert name in defined_in(path), f"{at}: {path} has no {name}"


def test_every_fault_is_tried_in_the_quick_run() -> None:
    """At least one test of each row has cases that are not `slow`."""
    for row in rows():
        named = TEST.findall(row.cells[-1])
        assert any(defined_in(path)[name] for path, name in named), f"line {row.line}: all its tests are slow"
