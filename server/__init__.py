"""The HTTP front, and the command line. Here: how threads of a parallel operation wait for each other.

A step is hundreds of short operations, and between them threads look for the others before they go to sleep. In the quiet,
sleeping soon cost 15 %. Beside one busy process on two processors, looking for long cost three times as much as sleeping
soon: the thread that looks holds the processor that the other one needs (docs/performance.md).
So that is chosen by whether others compute on this machine, before torch loads its OpenMP runtime.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

QUIET, BUSY = 20_000, 2_000  # looks, of about 40 ns
LOOKS, PAUSE = 5, 0.002  # at the number of running tasks; seconds between them


def spin_count(file: Path = Path("/proc/stat")) -> int:
    """GOMP_SPINCOUNT for this process, as the machine is now: it is read once, when the OpenMP runtime loads."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    seen = []
    for _ in range(LOOKS):
        seen += _running(file)
        time.sleep(PAUSE)
    return chosen(seen, os.cpu_count() or 1, allowed)


def chosen(running: Sequence[int], processors: int, allowed: int) -> int:
    """From the tasks that ran at each look, this one included: is a processor left for each of our threads?"""
    others = statistics.median(running) - 1 if running else 0
    return QUIET if processors - others >= allowed else BUSY


def _running(file: Path) -> list[int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) for line in lines if line.startswith("procs_running ")]


if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ["GOMP_SPINCOUNT"] = str(spin_count())
