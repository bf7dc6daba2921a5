"""Writes what an engine does to a file, as it does it. It decides nothing and never stops the engine.

    hooks, on the engine's thread ─▶ lines ─▶ queue ─▶ writing thread ─▶ FILE

The engine's thread makes the line, so that steps are slowed rather than memory filled; the disk is waited for elsewhere.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TextIO

from turnout.core import Finish, Request, Step, StepReport, hookimpl
from turnout.core.types import EngineInfo
from turnout.server.steplog.events import Finished, Stepped, added_line, dumps, header_line, step_line

BACKLOG = 64 * 2**20  # bytes that may wait for the disk
LINGER = 0.2  # seconds that lines are gathered before they are written together
CLOSE_TIMEOUT = 5.0  # seconds that a disk has to take the rest

log = logging.getLogger("turnout.record")


class Recorder:
    """A recording under way: register it with the hooks before the engine is built, `begin` it afterwards, `close` it.

    When the file is full, or the disk is, or too slow, the recording stops with one warning and the engine goes on.
    Raises ValueError for a file that can't be written, or holds something else than a recording.
    """

    def __init__(self, path: str, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer, self._path, self._limit, self._clock = Writer(_opened(path), path), path, limit, clock
        self._num_bytes = 0
        self._on = False
        self._finished: list[Finished] = []  # since the last step

    def begin(self, info: EngineInfo) -> None:
        """The engine is ready; nothing was asked of it yet."""
        self._on = True
        self._put(header_line(info))

    def close(self) -> None:
        """Write the rest. Harmless when done before."""
        self._on = False
        self._writer.close()

    @hookimpl
    def request_added(self, request: Request) -> None:
        if self._on:
            self._put(added_line(request))

    @hookimpl
    def request_dropped(self, request: Request) -> None:
        if self._on:
            self._put(dumps({"drop": request.id}) + "\n")

    @hookimpl
    def request_finished(self, request: Request) -> None:
        if not self._on:
            return
        assert request.finish is not None
        if request.finish is Finish.ABORT:  # between two steps
            self._put(dumps({"abort": request.id, "at": self._clock()}) + "\n")
        else:
            self._finished.append(finished(request))

    @hookimpl
    def step_finished(self, step: Step, report: StepReport) -> None:
        if self._on:
            ended, self._finished = self._finished, []
            self._put(step_line(stepped(step, report, ended)))

    def _put(self, line: str) -> None:
        self._num_bytes += len(line)  # ASCII
        if self._writer.trouble:
            self._stop(self._writer.trouble)
        elif self._num_bytes > self._limit:
            why = f"record_limit of {self._limit} bytes is reached"
            self._writer.put(dumps({"end": why}) + "\n")
            self._stop(why)
        else:
            self._writer.put(line)

    def _stop(self, why: str) -> None:
        self._on = False
        log.warning("recording to %s stops: %s; the engine goes on", self._path, why)


def finished(request: Request) -> Finished:
    """What is told of a request that has just ended."""
    why = request.finish.value if request.finish else ""
    return Finished(request.id, why, request.num_generated, request.num_cached, request.num_preemptions)


def ways_back(step: Step) -> list[tuple[str, str]]:
    """How each preempted request comes back. Right after the step: what was swapped lies in host memory then."""
    return [(request.id, "swap" if request.host_blocks else "recompute") for request in step.preempted]


def stepped(step: Step, report: StepReport, ended: list[Finished]) -> Stepped:
    """A step as it is recorded. Right after the step, as `ways_back`."""
    return Stepped(
        report.number,
        report.began,
        report.scheduled,
        report.ended,
        [(request.id, start, count, samples) for request, start, count, samples in step.chunks],
        ways_back(step),
        len(step.swap_out),
        len(step.copies),
        len(step.swap_in),
        list(report.tokens),
        dict(report.reasons),
        report.num_waiting,
        report.num_running,
        report.num_blocks_free,
        report.error,
        ended,
    )


class Writer:
    """Writes lines on a thread of its own. `trouble` says why it no longer does."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file, self.trouble = file, ""
        self._queue: SimpleQueue[str | None] = SimpleQueue()
        self._taken = self._given = 0  # characters: each is counted by one thread alone
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"record {name}", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Never waits for the disk."""
        self._given += len(line)
        if self._given - self._taken > BACKLOG:
            self.trouble = self.trouble or f"the disk is more than {BACKLOG >> 20} MiB behind"
            return
        self._queue.put(line)

    def close(self) -> None:
        """Write what is left, for a while."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        open_ = True
        while open_:
            lines = [self._queue.get()]
            self._closing.wait(LINGER)
            try:
                while True:
                    lines.append(self._queue.get_nowait())
            except Empty:
                pass
            open_ = None not in lines
            text = "".join(line for line in lines if line is not None)
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                self.trouble = error.strerror or str(error)
                open_ = False
            self._taken += len(text)
        try:
            self._file.close()
        except OSError as error:
            self.trouble = self.trouble or error.strerror or str(error)


def _opened(path: str) -> TextIO:
    """The file, empty. A recording that is there gives way, anything else stays."""
    try:
        if Path(path).is_file():
            with open(path, "rb") as before:
                start = before.read(12)
            if start and not start.startswith(b'{"turnout":'):
                raise ValueError(f"record={path}: the file is there and is no recording; choose another name")
        return open(path, "w", encoding="ascii", opener=_private)
    except OSError as error:
        raise ValueError(f"record={path}: cannot write there: {error.strerror or error}") from error


def _private(path: str, flags: int) -> int:
    """A recording holds everybody's tokens: this user alone may read it, also where the file was there before."""
    fd = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.fchmod(fd, 0o600)
    return fd
