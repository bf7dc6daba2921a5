"""What the terminal shows while work goes on, and how an error is said. It knows no work."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PAUSE = 0.1  # seconds between two looks at what is still the same stage


class Progress:
    """On stderr: in a terminal one bar with a running clock, else a line per stage. Closed, it leaves nothing behind.

    Call it with what is being done ("": still the same) and how much of `total` is; None: nobody knows how much there is.
    """

    def __init__(self, total: float | None = 1.0, head: str = "") -> None:
        self._head, self._stage, self._shown_at = head, "", 0.0
        self._bar = _bar(total, head or "starting") if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, stage: str, done: float) -> None:
        now, new = time.monotonic(), bool(stage) and stage != self._stage
        self._stage = stage or self._stage
        if self._bar is None:
            if new:
                print(f"turnout: {f'{self._head} {stage}'.strip()}", file=sys.stderr, flush=True)
        elif new or now - self._shown_at >= PAUSE:
            self._shown_at = now
            self._bar.start()
            text = f"{self._head} {self._stage}".strip()
            self._bar.update(self._bar.task_ids[0], description=text, completed=done)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def _bar(total: float | None, text: str) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counted = [] if total == 1.0 else [MofNCompleteColumn()]
    columns = (TextColumn("{task.description}"), BarColumn(), *counted, TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(text, total=total)
    return bar


def complain(error: object) -> None:
    """Say on stderr what went wrong; of an exception without a text, its kind."""
    print(f"turnout: {str(error) or type(error).__name__}", file=sys.stderr, flush=True)
