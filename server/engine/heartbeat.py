"""Signs of life of the engine's process while its main thread computes. It knows no engine and no pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from turnout.server.engine.messages import Alive

BEAT = 0.2  # seconds


class Heartbeat:
    """A thread that says every `BEAT` seconds that the process is alive, and why its step must be taken to hang, if so.

    The main thread says when it begins something and when it rests: nothing is sent while it does. How long something has
    been under way is counted in beats, not by the clock: a process that is suspended has no less time for it.
    """

    def __init__(self, overdue: Callable[[float], str | None], send: Callable[[object], None]) -> None:
        self._overdue, self._send = overdue, send
        self._number = self._seen = self._beats = (
            0  # of what was begun; of that seen at the last beat; beats it has lasted
        )
        self._resting = True

    def begin(self) -> None:
        self._number, self._resting = self._number + 1, False

    def rest(self) -> None:
        """There is nothing to do until somebody asks."""
        self._resting = True

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def beat(self) -> None:
        if self._resting:
            return
        self._beats = self._beats + 1 if self._seen == self._number else 0
        self._seen = self._number
        self._send(Alive(self._overdue(self._beats * BEAT)))

    def _run(self) -> None:
        while True:
            time.sleep(BEAT)
            self.beat()
