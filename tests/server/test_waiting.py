"""Threads look long for each other where the machine is theirs, and sleep soon where others compute beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnout.server import BUSY, QUIET, chosen, spin_count


@pytest.mark.parametrize(
    ("running", "processors", "allowed", "count"),
    [
        ([1, 1, 1, 1, 1], 2, 2, QUIET),  # nobody else
        ([2, 2, 1, 2, 2], 2, 2, BUSY),  # a neighbour on one of two processors
        ([1, 1, 4, 1, 1], 2, 2, QUIET),  # something passed by
        ([3, 3, 3, 3, 3], 8, 2, QUIET),  # a large machine, of which we may use two processors
        ([8, 9, 8, 8, 8], 8, 2, BUSY),
        ([], 2, 2, QUIET),  # a system that does not tell
    ],
)
def test_who_has_no_processor_to_spare_sleeps_soon(
    running: list[int], processors: int, allowed: int, count: int
) -> None:
    assert chosen(running, processors, allowed) == count


def test_the_number_of_running_tasks_is_read_from_the_system(tmp_path: Path) -> None:
    file = tmp_path / "stat"
    file.write_text("cpu  1 2 3\nprocs_running 1000\nprocs_blocked 0\n")
    assert spin_count(file) == BUSY
    assert spin_count(tmp_path / "absent") == QUIET


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}])
def test_what_the_user_has_set_stays(given: dict[str, str]) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in names} | given
    code = f"import turnout.server, os; print({{n: os.environ[n] for n in {names!r} if n in os.environ}})"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(given)
