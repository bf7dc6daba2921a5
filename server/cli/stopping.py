"""SIGINT and SIGTERM: the first asks the server to stop, a second one ends it at once. It knows no engine and no HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

FORCED_TIMEOUT = 3.0  # seconds from a second signal to the end of the process, whatever hangs
SAME_SIGNAL = 0.1  # seconds; what a tool sends to the process and then to its group is one signal, not two

log = logging.getLogger("turnout.server")


class Stopping:
    """Takes the signals while it is open. Only the main thread can; elsewhere nobody asks."""

    code = 0  # 128 + the number of the second signal

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill  # ends at once what would outlive this process; called from a signal handler or a thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_at: float | None = None
        self._deadline: float | None = None
        self._timer: threading.Timer | None = None
        self._before: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._timer is not None and not self.code:  # after a second signal it stays for what is left of the process
            self._timer.cancel()

    def asked(self) -> asyncio.Task[bool]:
        """A task of the running loop that is done once the server was asked to stop. Call it once."""
        self._loop, self._asked = asyncio.get_running_loop(), asyncio.Event()
        if self._asked_at is not None:
            self._asked.set()
        return self._loop.create_task(self._asked.wait())

    def bound(self, seconds: float, code: int) -> None:
        """Exit in so many seconds, or when asked before in fewer, whatever hangs."""
        deadline = time.monotonic() + seconds
        if self._deadline is not None and self._deadline <= deadline:
            return

        def leave() -> None:
            log.error("the server did not end by itself within %g s", seconds)
            self._kill()
            os._exit(code)

        if self._timer is not None:
            self._timer.cancel()
        self._deadline, self._timer = deadline, threading.Timer(seconds, leave)
        self._timer.daemon = True
        self._timer.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed: the end is near
                    self._loop.call_soon_threadsafe(self._asked.set)
        elif not self.code and time.monotonic() - self._asked_at > SAME_SIGNAL:
            self.code = 128 + number
            self._kill()
            self.bound(FORCED_TIMEOUT, self.code)
