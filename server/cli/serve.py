"""`turnout serve`: the engine's process, the HTTP server and the signals. It knows no route and no text.

bind the port ─▶ start the engine ─▶ loading (503) ─▶ ready ─▶ SIGINT or SIGTERM ─▶ draining (503) ─▶ exit
                                                                  a second one ─▶ exit at once
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from turnout.compose import plugins
from turnout.compose.config import chosen, to_container
from turnout.compose.plugins import PluginError
from turnout.server.api.connection import protocol
from turnout.server.cli.console import welcome
from turnout.server.cli.progress import Progress, complain
from turnout.server.cli.stopping import Stopping
from turnout.server.cli.unfailing import Unfailing
from turnout.server.config import ServeConfig, ServerConfig
from turnout.server.engine.bridge import EngineError, EngineProcess

if TYPE_CHECKING:
    from turnout.server.text.tokenizer import Text

CLOSE_TIMEOUT = 5  # seconds that slow clients have to take the rest of their answers
EXIT_TIMEOUT = 15.0  # seconds from the end of the drain to the end of the process, whatever hangs
ENGINE_FAILED = 70  # exit code: what a supervisor restarts
LEAST_LIFE = 10.0  # seconds; an engine that lives shorter is not started again
FORCED = 128  # exit codes above it are those of a second signal

Application = Callable[[str], Awaitable[tuple[ASGIApp, str]]]  # url -> (application, what to print when it is ready)


def serve(config: ServeConfig) -> int:
    """Serve until told to stop. Returns the exit code.

    0: told to stop, and did. 1: the port is taken, or loading failed. 70: the engine failed while serving.
    128 + the signal's number: told a second time.
    """
    sys.stdout, sys.stderr = Unfailing(sys.stdout), Unfailing(sys.stderr)
    found = plugins.load()
    options, loading = config.server, Progress()
    plain = to_container(config, found) | {"record": config.record, "record_limit": config.record_limit}
    engine = EngineProcess(plain, stall_timeout=options.stall_timeout, progress=loading)

    async def application(url: str) -> tuple[ASGIApp, str]:
        await asyncio.to_thread(_import_early)
        from turnout.server.api.app import create_app
        from turnout.server.text.parsers import chosen_parsers
        from turnout.server.text.tokenizer import Text

        text = await asyncio.to_thread(Text.load, await engine.found())
        info = await engine.ready()
        loading.close()
        composed = chosen(config, found)
        picked = {slot: info.plugins[slot]["name"] for slot, choice in composed.items() if choice == "auto"}
        _check_same(info.plugins, found.describe(composed | picked))
        name, needs_key = options.served_model_name or info.model, options.api_key is not None
        ready = welcome(info, url, name=name, chats=_chats(text), needs_key=needs_key)
        if config.record is not None:
            ready += f"\n\nAll requests are recorded in {config.record}, their tokens too."
        parsers = chosen_parsers(config.tool_parser, config.reasoning_parser, composed, found, text.template)
        return create_app(engine, text, options, parsers), ready

    try:
        code = run(engine, options, application)
    finally:
        loading.close()
    if code > FORCED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # told twice: the interpreter takes seconds to put its modules away
    return code


def run(engine: EngineProcess, options: ServerConfig, application: Application) -> int:
    """Serve `application`, which waits for the engine to be ready. Returns the exit code."""
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        complain(f"cannot listen on {where}: {error.strerror or error}. Choose others with server.host and server.port")
        return 1
    if options.api_key is None and not listener.getsockname()[0].startswith(("127.", "::1")):
        complain(
            f"anybody who reaches {options.host} can use this server: it asks for no key. Set server.api_key, or "
            "server.host=127.0.0.1 for this machine alone"
        )
    gate = ReadyGate(engine)
    server = Server(
        uvicorn.Config(
            gate,
            http=protocol(options.request_timeout, options.max_connections),
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=options.log_requests,
            timeout_keep_alive=options.keep_alive,  # type: ignore[arg-type]  # as good as an int
            timeout_graceful_shutdown=CLOSE_TIMEOUT,
        )
    )
    if options.log_requests:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)

    def kill() -> None:
        engine.kill()
        server.force_exit = True

    with listener, Stopping(kill) as stopping:
        session = _Session(engine, server, gate, listener, stopping, options)
        with asyncio.Runner() as runner:
            code = runner.run(session.run(application))
        return stopping.code or code


class _Session:
    """One server from start to end."""

    def __init__(
        self,
        engine: EngineProcess,
        server: Server,
        gate: ReadyGate,
        listener: socket.socket,
        stopping: Stopping,
        options: ServerConfig,
    ) -> None:
        self._engine, self._server, self._gate, self._listener = engine, server, gate, listener
        self._stopping, self._drain_timeout = stopping, options.drain_timeout
        self._on_engine_death = options.on_engine_death

    async def run(self, application: Application) -> int:
        """Returns the exit code of a server that nobody had to force."""
        asked = self._stopping.asked()
        self._engine.start()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        loading = asyncio.create_task(self._load(application))
        try:
            await _any_of(loading, asked, serving)
            if loading.done() and loading.result():
                failed = await self._serve(asked, serving)
                await self._drain()
                if failed:
                    return ENGINE_FAILED
            return 0 if asked.done() and not self._engine.ended else 1
        finally:
            self._stopping.bound(EXIT_TIMEOUT, 1)
            loading.cancel()
            self._server.should_exit = True
            try:
                await serving
            finally:
                await self._engine.stop()

    async def _serve(self, asked: asyncio.Task[bool], serving: asyncio.Task[None]) -> bool:
        """Until told to stop. True: the engine failed, and does not come back."""
        while True:
            began, failed = time.monotonic(), asyncio.create_task(self._engine.end())
            await _any_of(asked, serving, failed)
            if asked.done() or serving.done():
                failed.cancel()
                return False
            lived = time.monotonic() - began
            if self._on_engine_death == "exit" or lived < LEAST_LIFE:
                complain(f"{self._engine.trouble()}. The server ends with code {ENGINE_FAILED}")
                return True
            complain(f"{self._engine.trouble()}. It is started again (server.on_engine_death=restart)")
            await self._engine.restart()
            loading = asyncio.ensure_future(self._engine.ready())
            await _any_of(asked, serving, loading)
            if not loading.done():
                loading.cancel()
                return False
            if loading.exception() is not None:
                complain(f"it could not be: {loading.exception()}. The server ends with code {ENGINE_FAILED}")
                return True
            complain("the engine is back")

    async def _load(self, application: Application) -> bool:
        """Wait for the engine, then let requests in. False: it failed, and why was printed."""
        began = time.monotonic()
        try:
            _, (self._gate.app, ready) = await asyncio.gather(self._engine.ready(), application(_url(self._listener)))
        except (EngineError, PluginError, ValueError) as error:
            complain(str(error))
            return False
        print(f"{ready}\n\nReady after {time.monotonic() - began:.1f} s. Ctrl-C stops it.", flush=True)
        return True

    async def _drain(self) -> None:
        """Let open requests end, with the port open for the news that no others are welcome."""
        self._engine.drain()
        limit = f"{self._drain_timeout:g} s (server.drain_timeout)"
        if num := self._engine.num_open:
            requests = f"{num} open request{'s' * (num > 1)}"
            complain(f"stopping; {requests} may take up to {limit}. A second signal ends it at once.")
        if not await self._engine.drained(self._drain_timeout):
            complain(f"requests that did not end within {limit} got an error")


async def _any_of(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that a second server on the port fails at once. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.sort(key=lambda info: info[0] != socket.AF_INET)  # of localhost, the IPv4 address
    family, *_, address = found[0]
    both = host == "::" and socket.has_dualstack_ipv6()  # every address, of either family
    return socket.create_server(address[:2], family=family, backlog=2048, dualstack_ipv6=both)


def _url(listener: socket.socket) -> str:
    """Where to reach it from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _import_early() -> None:
    """What the application needs takes seconds to import, so it is done while the engine loads."""
    import transformers.models.auto.tokenization_auto  # noqa: F401

    import turnout.server.api.app  # noqa: F401


def _chats(text: Text) -> bool:
    """Whether the model has a chat template that takes the example."""
    try:
        return bool(text.chat([{"role": "user", "content": "Hello!"}]))
    except ValueError:
        return False


def _check_same(theirs: Mapping[str, Mapping[str, str]], ours: Mapping[str, Mapping[str, str]]) -> None:
    """The engine's process must have found the plugins that were composed here. Which kernels it computes with, it alone
    knows."""
    theirs = {slot: {key: said for key, said in about.items() if key != "kernels"} for slot, about in theirs.items()}
    if theirs != ours:
        raise PluginError(
            f"the engine's process found other plugins than this one: {theirs} instead of {ours}. Were packages "
            "installed or removed meanwhile? Start again."
        )


class ReadyGate:
    """Answers 503 until there is an application to answer."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            return await self.app(scope, receive, send)
        from turnout.server.api.errors import reply, unavailable

        await reply(unavailable(self._engine.trouble() or "loading"))(scope, receive, send)


class Server(uvicorn.Server):
    """uvicorn without its answer to signals: ours drains first, with the port open."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
