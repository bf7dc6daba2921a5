"""How far a benchmark is, on a terminal; elsewhere nothing is said."""

from __future__ import annotations

import sys
import time
from typing import Self

from turnout.lab.bench.config import BenchConfig

PAUSE = 0.1  # seconds between two looks at the bar


class Progress:
    """A bar for one point; a context. Call it with what is being done ("": still the same) and the requests answered."""

    def __init__(self, head: str, config: BenchConfig) -> None:
        self._head, self._stage, self._spoke = head, "", 0.0
        self._total: int | None = getattr(config.workload, "num_requests", None)
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(head, total=self._total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, finished: int) -> None:
        now = time.monotonic()
        if self._bar is None or (not stage and now - self._spoke < PAUSE):
            return
        self._stage, self._spoke = stage or self._stage, now
        self._bar.update(self._task, description=f"{self._head} {self._stage}".strip(), completed=finished)
