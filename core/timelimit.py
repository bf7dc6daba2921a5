"""A bound on the time a plugin's call may take. It knows neither plugins nor engines.

One thread of the process counts the ticks each call under way has lasted and raises `Overdue` in the thread of one that
lasts too long, between two of its bytecodes. A call that hangs inside native code stays there: the server notices that by
`Engine.overdue`. Ticks are counted, not the clock's time: a suspended process isn't blamed for it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

TICK = 0.25  # seconds

_limits: WeakSet[TimeLimit] = WeakSet()
_lock = threading.Lock()  # of the set, and of starting the thread
_thread: threading.Thread | None = None


class Overdue(BaseException):
    """Raised in a call that lasts too long. No `Exception`, so that what is called doesn't catch it by the way."""


class TimeLimit:
    """Calls functions, one at a time, and ends one that is not done after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._caller, self._num_calls = 0, 0
        self._current = self._seen = 0  # number of the call under way, 0: none; the one seen at the last tick
        self._ticks, self._raised = 0, False
        _watch(self)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Raises `Overdue` when it lasts too long, and whatever it raises."""
        self._caller, self._num_calls = threading.get_ident(), self._num_calls + 1
        self._current = self._num_calls
        try:
            try:
                function(*args)
            finally:
                self._end()
        except Overdue:
            self._end()  # it may have been raised in `_end` itself, but not twice
            raise

    def _end(self) -> None:
        with self._lock:
            self._current = 0
            if self._raised:  # perhaps not delivered yet: take it back
                _raise_in(self._caller, None)
                self._raised = False

    def tick(self) -> None:
        """Called by the watching thread."""
        with self._lock:
            if not self._current or self._current != self._seen:
                self._seen, self._ticks = self._current, 0
                return
            self._ticks += 1
            if self._ticks * TICK >= self.seconds:
                self._ticks, self._raised = 0, True
                _raise_in(self._caller, Overdue)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)


def _watch(limit: TimeLimit) -> None:
    global _thread
    with _lock:
        _limits.add(limit)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_tick_all, name="turnout-time-limit", daemon=True)
            _thread.start()


def _tick_all() -> None:
    while True:
        time.sleep(TICK)
        with _lock:
            limits = list(_limits)
        for limit in limits:
            limit.tick()
        del limits
