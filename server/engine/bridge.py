"""asyncio on this side, the engine in its own process on the other. It knows no HTTP and no text.

A process that ends is known at once, for its pipe ends with it. One that is frozen is told by its silence: it has
requests to compute, or owes an answer, and a thread of its own that would say so says nothing for `stall_timeout`
seconds, however long a step takes. A step that hangs is told by that thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from turnout.core.types import EngineInfo, Finish, Output, Stats
from turnout.server.engine.messages import (
    Abort,
    Alive,
    Asked,
    BeamSearch,
    Fatal,
    Found,
    ParallelSampling,
    Progress,
    Question,
    Ready,
    Reply,
    Report,
    Stop,
)
from turnout.server.engine.process import ChildProcess, exit_reason

BUILDER = "turnout.server.engine.worker:build"
STOP_TIMEOUT = 5.0  # seconds the process has to leave when told to

log = logging.getLogger("turnout.server")

Stream = asyncio.Queue[Output | Exception]


def _nothing() -> None: ...


class EngineError(RuntimeError):
    """The engine cannot answer. `status`: 500 when one request failed, 503 when the engine is gone or stopping."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


class EngineClient(Protocol):
    """What the HTTP layer sees of the engine."""

    info: EngineInfo  # available once ready
    stats: Stats  # refreshed with every step
    on_step: Callable[[], None]  # called after each refresh, on the event loop

    def trouble(self) -> str | None:
        """None when able to serve, else why not."""
        ...

    def generate(self, asked: Asked) -> AsyncIterator[Output]:
        """Outputs as they come; leaving the iterator early aborts what is open. The last one has `finish` set; where
        several answers are asked for, the last one of each has.

        Raises ValueError when the engine refuses the request, EngineError when the engine cannot answer.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End one answer of a parallel sampling, whose reader has enough: its last output is an ABORT. Unknown ids are
        ignored."""
        ...

    async def ask(self, topic: str, name: str = "") -> Any:
        """What the engine's process answers between two steps: see Observers.answer. Raises EngineError."""
        ...


class EngineProcess:
    """The engine in a process of its own: `start` it, await `ready`, `stop` it. Of one event loop, `kill` excepted."""

    info: EngineInfo

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        stall_timeout: float = 60.0,  # seconds; 0: never call it frozen
        progress: Callable[[str, float], None] = lambda stage, share: None,
        builder: str = BUILDER,
    ) -> None:
        self.stats = Stats()
        self.on_step: Callable[[], None] = _nothing
        self._config, self._stall_timeout, self._progress, self._builder = config, stall_timeout, progress, builder
        self._trouble: str | None = "loading"
        self._process: ChildProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._streams: dict[str, Stream] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0
        self._sent = self._handled = self._signs = 0  # messages to it; of these, handled; messages from it
        self._busy = self._ended = self._killed = False

    def start(self) -> None:
        """Start the process and return."""
        self._loop, self._end_known = asyncio.get_running_loop(), asyncio.Event()
        self._found: asyncio.Future[str] = self._loop.create_future()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._exit = asyncio.Event()
        self._process = ChildProcess(
            self._config,
            self._builder,
            log_level=logging.getLogger().getEffectiveLevel(),
            on_message=self._receive,
            on_exit=self._exited,
        )

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._streams)

    @property
    def ended(self) -> bool:
        """No answer will ever come again."""
        return self._ended

    async def found(self) -> str:
        """Wait until the model's folder is there, which is before the engine is loaded. Raises as `ready` does."""
        return await asyncio.shield(self._found)

    async def ready(self) -> EngineInfo:
        """Wait until the engine is loaded. Raises EngineError with the reason when it fails to."""
        return await asyncio.shield(self._ready)

    async def end(self) -> None:
        """Wait until no answer will ever come again."""
        await self._end_known.wait()

    async def restart(self) -> None:
        """Start the process anew once it has ended; `ready` says when it is loaded. What was open has got its error."""
        assert self._process is not None and self._ended
        self._process.kill()
        await self._exit.wait()
        if self._watching is not None:
            self._watching.cancel()
        self.stats, self._trouble = Stats(), "loading"
        self._sent = self._handled = self._signs = 0
        self._busy = self._ended = False
        self.start()

    def trouble(self) -> str | None:
        return self._trouble

    async def generate(self, asked: Asked) -> AsyncIterator[Output]:
        """See EngineClient."""
        if self._trouble is not None:
            raise EngineError(self._trouble)
        names = asked.answers if isinstance(asked, BeamSearch | ParallelSampling) else (asked.id,)
        for name in names:
            if name in self._streams:
                raise ValueError(f"request id {name!r} is already in use")
        self._send(asked)
        stream, num_open = Stream(), len(names)
        self._streams |= dict.fromkeys(names, stream)
        try:
            while num_open:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                num_open -= item.finish is not None
        finally:
            left = [name for name in names if self._streams.get(name) is stream]  # left early
            for name in left:
                del self._streams[name]
            for name in left[:1] if isinstance(asked, BeamSearch) else left:  # a search is one request
                self._send(Abort(asked.id if isinstance(asked, BeamSearch) else name))

    def abort(self, request_id: str) -> None:
        """See EngineClient."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._send(Abort(request_id))
            stream.put_nowait(Output(request_id, finish=Finish.ABORT))

    async def ask(self, topic: str, name: str = "") -> Any:
        """See EngineClient."""
        if self._ended or not self._ready.done():
            raise EngineError(self._trouble or "loading")
        self._num_asked += 1
        reply = self._replies[self._num_asked] = self._loop.create_future()
        self._send(Question(self._num_asked, topic, name))
        return await reply

    def drain(self) -> None:
        """Refuse new requests from now on; those open go on."""
        self._trouble = self._trouble or "draining"

    async def drained(self, timeout: float) -> bool:
        """Wait for the open requests to end. After `timeout` seconds the rest get an EngineError; False then."""
        deadline = self._loop.time() + timeout
        while self._streams and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        all_ended = not self._streams
        self._fail_open("the server is shutting down and the request did not end in time")
        return all_ended

    async def stop(self) -> None:
        """End the process and wait for its end. Requests still open get an EngineError."""
        if self._process is None:
            return
        loading = not self._ready.done()
        self._end("the server is stopping")
        self._process.interrupt() if loading else self._process.send(Stop())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._exit.wait(), STOP_TIMEOUT)
        self._process.kill()
        await self._exit.wait()

    def kill(self) -> None:
        """End the process at once; open requests get an EngineError. From any thread, even before `start`."""
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def _send(self, message: Asked | Abort | Question) -> None:
        assert self._process is not None
        self._process.send(message)
        self._sent += 1

    def _receive(self, message: object) -> None:
        self._signs += 1
        match message:
            case Report():
                self._take(message)
            case Reply(number, answer):
                reply = self._replies.pop(number)
                if not reply.done():  # who asked may have left
                    reply.set_result(answer)
            case Progress(stage, share):
                self._progress(stage, share)
            case Alive(overdue) if overdue and self._stall_timeout and not self._ended:
                self._hangs(f"the engine hangs: {overdue}")
            case Found(path) if not self._found.done():
                self._found.set_result(path)
            case Ready(info) if not self._ended:
                self.info, self._trouble = info, None
                self._receive(Found(info.path))
                self._ready.set_result(info)
                self._watching = self._loop.create_task(self._watch())
            case Fatal(reason):
                self._fail(reason)
                assert self._process is not None
                self._loop.call_later(STOP_TIMEOUT, self._process.kill)

    def _take(self, report: Report) -> None:
        self.stats, self._handled, self._busy = report.stats, report.handled, report.busy
        for fields in report.outputs:
            output = Output._make(fields)
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its reader left meanwhile
            if output.finish:
                del self._streams[output.request_id]
            stream.put_nowait(output)
        for request_id, reason in report.refused:
            if request_id in self._streams:
                self._streams.pop(request_id).put_nowait(ValueError(reason))
        self.on_step()

    async def _watch(self) -> None:
        """Tell a frozen process. Ticks are counted, not the clock's time: when a machine or a terminal suspends the
        server, the engine is suspended too."""
        tick = min(1.0, self._stall_timeout / 8)
        silent, before = 0.0, (False, 0)
        while self._stall_timeout and not self._ended:
            await asyncio.sleep(tick)
            now = (self._busy or self._sent > self._handled, self._signs)
            silent = silent + tick if now[0] and now == before else 0.0
            before = now
            if silent >= self._stall_timeout and not self._ended:
                self._hangs(
                    f"the engine is frozen: no sign of life for {self._stall_timeout:g} s (server.stall_timeout)"
                )

    def _hangs(self, how: str) -> None:
        assert self._process is not None
        self._process.kill_with_traceback()
        self._fail(f"{how}, so its process was ended")

    def _exited(self, code: int) -> None:
        if self._killed:
            self._end("the server was ended at once")
        self._fail(f"the engine process died: {exit_reason(code)}")
        self._exit.set()

    def _fail(self, reason: str) -> None:
        if not self._ended and self._ready.done():  # before that, `ready` tells
            log.error("%s", reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        """No more answers will come. The first reason stays."""
        if self._ended:
            return
        self._ended, self._trouble = True, reason
        self._end_known.set()
        self._fail_open(reason)
        futures: list[asyncio.Future[Any]] = [self._found, self._ready, *self._replies.values()]
        for future in futures:
            if not future.done():
                future.set_exception(EngineError(reason))
                future.exception()  # marks it as seen: nobody has to wait for it

    def _fail_open(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.put_nowait(EngineError(reason))
            self._send(Abort(request_id))
