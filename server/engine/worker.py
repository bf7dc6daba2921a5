"""The engine's own process: take messages, step, report. It knows no text, no HTTP and no asyncio.

    parent ── Ask, Abort, Stop ─▶ listening thread ─▶ inbox ─▶ engine ── one Report a step ─▶ parent

The process ends when told to, when the engine fails, and when the parent is gone, however the parent went.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Protocol

from turnout.core.types import ContractError, EngineInfo, Output, Stats
from turnout.server.engine.heartbeat import Heartbeat
from turnout.server.engine.messages import (
    Abort,
    Ask,
    Asked,
    Fatal,
    Found,
    ParallelSampling,
    Progress,
    Question,
    Ready,
    Reply,
    Report,
    Setup,
    Stop,
    ToEngine,
)
from turnout.server.engine.parallel import requests_of

STATS_PAUSE = 0.2  # seconds between reports while steps compute nothing
MAX_FAILURES = 3  # of the scheduler, one after the other with nothing computed between; then every request ends
PROGRESS_PAUSE = 0.05  # seconds between progress messages of one stage
PARENTS_SIGNALS = {signal.SIGINT, signal.SIGTERM}  # sent to a whole group or service; the parent alone answers them
LEAVE_SIGNAL = signal.SIGUSR2  # ends a process that is still loading; what it was writing on disk is tidied up
TRACEBACK_SIGNAL = signal.SIGUSR1  # makes the process write what each of its threads is doing to stderr
PR_SET_PDEATHSIG = 1  # from linux/prctl.h

log = logging.getLogger("turnout.engine")

Send = Callable[[object], None]


class Served(Protocol):
    """What the loop needs of an engine; `ServedEngine` is the real one."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def busy(self) -> bool: ...
    @property
    def pause(self) -> float: ...
    def add(self, asked: Ask) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Output]: ...
    def fail(self, reason: str) -> list[Output]: ...
    def overdue(self, seconds: float) -> str | None: ...
    def answer(self, topic: str, name: str) -> object: ...
    def close(self) -> None: ...


class LoadingReporter:
    """How a builder says how loading goes. As a progress function it may be called for every tensor."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._stage, self._spoke = "", 0.0

    def __call__(self, stage: str, share: float) -> None:
        now = time.monotonic()
        if stage != self._stage or share >= 1.0 or now - self._spoke > PROGRESS_PAUSE:
            self._stage, self._spoke = stage, now
            self._send(Progress(stage, share))

    def found(self, path: str) -> None:
        """The model's folder is there: its tokenizer can be loaded elsewhere meanwhile."""
        self._send(Found(path))


def build(plain: Mapping[str, Any], report: LoadingReporter) -> Served:
    """The real engine. Raises ValueError or PluginError for what the user can mend."""
    from turnout.compose import plugins
    from turnout.compose.build import build_engine
    from turnout.compose.config import from_container
    from turnout.server.engine.beam import ServedEngine
    from turnout.server.steplog.observe import Observers

    found = plugins.load()
    observers = Observers(found.manager, plain.get("record"), plain.get("record_limit", 0))
    return ServedEngine(build_engine(from_container(plain, found), report, report.found), observers)


class Loop:
    """Steps while there is work, sleeps while there is none."""

    def __init__(self, engine: Served, inbox: SimpleQueue[ToEngine], send: Send) -> None:
        self._engine, self._inbox, self._send = engine, inbox, send
        self._handled = self._reported = 0  # messages
        self._refused: list[tuple[str, str]] = []
        self._spoke = 0.0  # when the last report went
        self._failures = 0
        self.heartbeat = Heartbeat(engine.overdue, send)

    def run(self) -> None:
        """Returns when told to stop. Raises what the engine raises, faults of its scheduler excepted: its state is unknown
        then."""
        engine, pause = self._engine, None
        while self._receive(pause):
            self.heartbeat.begin()
            outputs = self._step() if engine.busy else []
            pause = engine.pause if engine.busy else None
            self._report(outputs, computed=bool(outputs) or pause == 0.0)
            if pause is None:
                self.heartbeat.rest()

    def _step(self) -> list[Output]:
        """A step. A scheduler that fails is asked again; when it fails on and on, it is its requests that end."""
        try:
            outputs = self._engine.step()
        except ContractError as error:
            self._failures += 1
            if self._failures < MAX_FAILURES:
                log.warning("%s; the step was undone, and the next one is tried", error, exc_info=error)
                return []
            self._failures = 0
            log.error("%s, %d times in a row: every open request ends with this error", error, MAX_FAILURES)
            return self._engine.fail(str(error))
        if self._engine.pause == 0.0:
            self._failures = 0
        return outputs

    def _receive(self, pause: float | None) -> bool:
        """Handle every message there is, waiting up to `pause` seconds for the first (None: for ever). False: stop."""
        try:
            while True:
                message = self._inbox.get_nowait() if pause == 0.0 else self._inbox.get(timeout=pause)
                pause = 0.0
                if isinstance(message, Stop):
                    return False
                self._handle(message)
        except Empty:
            return True

    def _handle(self, message: Asked | Abort | Question) -> None:
        self._handled += 1
        if isinstance(message, Abort):
            self._engine.abort(message.request_id)
            return
        if isinstance(message, Question):
            self._send(Reply(message.number, self._engine.answer(message.topic, message.name)))
            return
        for asked in requests_of(message) if isinstance(message, ParallelSampling) else (message,):
            try:
                self._engine.add(asked)
            except ValueError as error:
                self._refused.append((asked.id, str(error)))

    def _report(self, outputs: list[Output], computed: bool) -> None:
        now = time.monotonic()
        if not computed and self._handled == self._reported and now - self._spoke < STATS_PAUSE:
            return
        fields = [tuple(output) for output in outputs]
        self._send(Report(self._handled, self._engine.busy, fields, self._refused, self._engine.stats))
        self._refused, self._reported, self._spoke = [], self._handled, now


def main(inbox_fd: int, outbox_fd: int) -> None:
    """Entry of the process; the two pipe ends were inherited."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(LEAVE_SIGNAL, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)  # the parent held them back until here
    faulthandler.enable()
    faulthandler.register(TRACEBACK_SIGNAL)
    inbox, outbox = Connection(inbox_fd, writable=False), Connection(outbox_fd, readable=False)
    try:
        setup: Setup = inbox.recv()
    except EOFError:
        sys.exit(1)
    sys.path[:] = setup.module_path
    if setup.dies_with is not None:
        _die_with(setup.dies_with)
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=setup.log_level, format=form, stream=sys.stderr)
    inform = _sender(outbox)
    messages: SimpleQueue[ToEngine] = SimpleQueue()
    threading.Thread(target=_listen, args=(inbox, messages), name="listen", daemon=True).start()
    engine = load(setup, inform)
    signal.signal(LEAVE_SIGNAL, signal.SIG_IGN)  # from here on it listens to Stop
    inform(Ready(engine.info))
    compute(engine, messages, inform)


def load(setup: Setup, send: Send) -> Served:
    """Build the engine, or say why it can't be and exit."""
    from turnout.compose.plugins import PluginError

    try:
        module, _, function = setup.builder.partition(":")
        engine: Served = getattr(importlib.import_module(module), function)(setup.config, LoadingReporter(send))
        return engine
    except (ValueError, PluginError) as error:  # the user's to mend: no traceback
        log.debug("the engine could not be built", exc_info=True)
        send(Fatal(str(error)))
    except Exception as error:
        log.exception("the engine could not be built")
        send(Fatal(f"the engine could not be built: {type(error).__name__}: {error}"))
    sys.exit(1)


def compute(engine: Served, inbox: SimpleQueue[ToEngine], send: Send) -> None:
    """Run the engine until told to stop, or say why it failed and exit."""
    try:
        loop = Loop(engine, inbox, send)
        loop.heartbeat.start()
        loop.run()
    except Exception as error:
        log.exception("the engine failed")
        send(Fatal(f"the engine failed: {type(error).__name__}: {error}"))
        sys.exit(1)
    finally:
        engine.close()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(1)


def _sender(outbox: Connection) -> Send:
    lock = threading.Lock()  # the heartbeat speaks too

    def send(message: object) -> None:
        try:
            pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            with lock:
                outbox.send_bytes(pickled)
        except OSError:
            os._exit(1)  # nobody reads any more: the parent is gone

    return send


def _listen(inbox: Connection, messages: SimpleQueue[ToEngine]) -> None:
    """Hand over what the parent sends. The pipe's end ends this process, even in the middle of a step."""
    while True:
        try:
            message = pickle.loads(inbox.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)
        messages.put(message)


def _die_with(parent: int) -> None:
    """Let the kernel end this process with its parent: a step that keeps the listening thread from running would
    outlive it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before the call
            os._exit(1)
