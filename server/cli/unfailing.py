"""A stream that loses what it cannot write. It knows no command."""

from __future__ import annotations

import os


class Unfailing:
    """A stream to print to that never raises: on a full disk, say, what is printed is lost from then on."""

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried("write", text) or 0

    def flush(self) -> None:
        self._tried("flush")

    def _tried(self, name: str, *args: str) -> int | None:
        try:
            found: int | None = getattr(self._stream, name)(*args)
            return found
        except (OSError, ValueError):
            self._to_nothing()
            return None

    def _to_nothing(self) -> None:
        """What waits in the stream's buffer must go somewhere, or each flush would fail again, the last one at the exit."""
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())  # type: ignore[attr-defined]
            os.close(nothing)
            self._stream.flush()  # type: ignore[attr-defined]
        except (OSError, ValueError):
            pass  # closed altogether
