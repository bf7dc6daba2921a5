"""A child process and the two pipes to it. It carries messages and tells the end; what they mean is known elsewhere.

send() ─▶ writing thread ─▶ pipe ─▶ process ─▶ pipe ─▶ reading thread ─▶ on_message, at last on_exit, in the loop
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from turnout.server.engine.messages import Setup
from turnout.server.engine.worker import LEAVE_SIGNAL, PARENTS_SIGNALS, TRACEBACK_SIGNAL

LEAVE_TIMEOUT = 5.0  # seconds a process has to be gone after it has closed its pipe
TRACEBACK_TIME = 0.5  # seconds a hanging process has to say where it hangs


class ChildProcess:
    """`turnout.server.engine.worker` in a process of its own, started at once. Both callbacks run in the event loop."""

    def __init__(
        self,
        config: Mapping[str, Any],
        builder: str,
        *,
        log_level: int,
        on_message: Callable[[object], None],
        on_exit: Callable[[int], None],  # with the exit code, negative for a signal; after the last message
    ) -> None:
        self._loop, self._on_message, self._on_exit = asyncio.get_running_loop(), on_message, on_exit
        self._outbox: SimpleQueue[object] = SimpleQueue()  # None: no more
        their_inbox, to_process = Pipe(duplex=False)
        from_process, their_outbox = Pipe(duplex=False)
        fds = (their_inbox.fileno(), their_outbox.fileno())
        with their_inbox, their_outbox, _signals_held():
            # multiprocessing.Process would run the user's main script again in there, and keep a helper process beside it
            command = [sys.executable, "-P", "-c", f"from turnout.server.engine.worker import main; main{fds}"]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        threading.Thread(target=self._write, args=(to_process,), name="to-engine", daemon=True).start()
        threading.Thread(target=self._read, args=(from_process,), name="from-engine", daemon=True).start()
        in_main = (
            threading.current_thread() is threading.main_thread()
        )  # the kernel watches the thread, not the process
        self.send(Setup(config, builder, sys.path, os.getpid() if in_main else None, log_level))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Never blocks: the pipe may be full while the process is in a long step, and a prompt may be long."""
        self._outbox.put(message)

    def kill(self) -> None:
        """End the process at once, from any thread. Harmless when it has ended."""
        self._process.kill()

    def interrupt(self) -> None:
        """Ask a process that is still loading to tidy up and leave."""
        self._process.send_signal(LEAVE_SIGNAL)

    def kill_with_traceback(self) -> None:
        """End a hanging process; it writes where it hangs to stderr."""
        self._process.send_signal(TRACEBACK_SIGNAL)
        self._loop.call_later(TRACEBACK_TIME, self.kill)

    def _write(self, pipe: Connection) -> None:
        with pipe, suppress(OSError):  # OSError: the process has ended, as the reading thread tells
            while (message := self._outbox.get()) is not None:
                pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _read(self, pipe: Connection) -> None:
        with pipe, suppress(RuntimeError):  # RuntimeError: the loop was closed
            with suppress(EOFError, OSError):
                while True:
                    self._loop.call_soon_threadsafe(self._on_message, pickle.loads(pipe.recv_bytes()))
            try:
                code = self._process.wait(LEAVE_TIMEOUT)
            except subprocess.TimeoutExpired:
                self.kill()
                code = self._process.wait()
            self._outbox.put(None)
            self._loop.call_soon_threadsafe(self._on_exit, code)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait meanwhile. A process started here holds them back too, until it has said how to take them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_reason(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, often sent when memory runs out" if name == "SIGKILL" else name
