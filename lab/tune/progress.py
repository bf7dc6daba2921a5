"""What a walk is at, a line at a time: on a terminal with a spinner and the time, elsewhere plain."""

from __future__ import annotations

import sys
import time
from typing import Self


class Progress:
    """Call it with what is being done ("": still the same) and the requests answered; a context."""

    def __init__(self) -> None:
        self._stage, self._began, self._status = "", time.monotonic(), None
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("starting")

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, stage: str, finished: int) -> None:
        if self._status is None:
            if stage and stage != self._stage:
                print(f"turnout: {stage}", file=sys.stderr, flush=True)
            self._stage = stage or self._stage
            return
        self._stage = stage or self._stage
        count = f", {finished} requests" if finished else ""
        self._status.update(f"{self._stage}{count} ({time.monotonic() - self._began:.0f} s)")
