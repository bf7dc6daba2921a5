"""A server around the scripted engine, in a process of its own, for tests of signals and of what is left behind."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_engine
import httpx
import psutil
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from turnout.core.types import Request, Sampling
from turnout.server.cli import serve
from turnout.server.config import ServerConfig
from turnout.server.engine.bridge import EngineClient, EngineError, EngineProcess

TIMEOUT = 20.0  # seconds a test waits for anything


class Served:
    """A running server, as seen from outside."""

    def __init__(self, process: multiprocessing.process.BaseProcess, folder: Path) -> None:
        self.process, self._folder = process, folder
        self._children: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    @property
    def url(self) -> str:
        """Known once it is ready."""
        wait_until(lambda: "Ready after" in self.stdout or not self.process.is_alive())
        self.note_children()
        return self.stdout.split()[0]

    def note_children(self) -> list[psutil.Process]:
        """Its processes now; `left_behind` asks for them later."""
        children = psutil.Process(self.pid).children(recursive=True)
        self._children.update(children)
        return children

    def health(self) -> int:
        return httpx.get(f"{self.url}/health").status_code

    def exit_code(self, within: float = TIMEOUT) -> int | None:
        self.process.join(within)
        return self.process.exitcode

    def left_behind(self) -> list[psutil.Process]:
        """Of the processes it had, those that do not go."""
        _, alive = psutil.wait_procs(self._children, timeout=2.0)
        return alive


@contextmanager
def serving(folder: Path, options: ServerConfig | None = None, **config: str) -> Iterator[Served]:
    """A server in a session of its own, so that a signal can go to all of its processes as Ctrl-C does."""
    context = multiprocessing.get_context("forkserver")  # forks a process that has imported what is slow to import
    context.set_forkserver_preload(["turnout.server.cli.serve", "turnout.server.api.errors", "httpx", "psutil"])
    for name in ("stdout", "stderr"):
        (folder / name).touch()
    process = context.Process(target=_main, args=(folder, options or ServerConfig(port=0), config))
    process.start()
    served = Served(process, folder)
    try:
        yield served
    finally:
        if process.is_alive():
            served.note_children()
            process.kill()
        process.join()
        for child in served._children:
            if child.is_running():
                child.kill()


def wait_until(condition: object, timeout: float = TIMEOUT) -> None:
    assert callable(condition)
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def _main(folder: Path, options: ServerConfig, config: dict[str, str]) -> None:
    os.setsid()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY), fd)
    serve.LEAST_LIFE = float(config.pop("least_life", serve.LEAST_LIFE))
    engine = EngineProcess(config, builder=fake_engine.BUILDER, stall_timeout=1.0)

    async def application(url: str) -> tuple[Starlette, str]:
        await engine.ready()
        return _application(engine), url

    sys.exit(serve.run(engine, options, application))


def _application(engine: EngineClient) -> Starlette:
    def health(request: HTTPRequest) -> PlainTextResponse:
        trouble = engine.trouble()
        return PlainTextResponse(trouble or "well", 200 if trouble is None else 503)

    async def count(request: HTTPRequest) -> StreamingResponse | PlainTextResponse:
        """`/count/NAME?n=3&do=wait`: a line per token."""
        if trouble := engine.trouble():
            return PlainTextResponse(trouble, 503)
        query = request.query_params
        sampling = Sampling(max_tokens=int(query["n"]))
        asked = Request(request.path_params["name"], [1], sampling, labels={"do": query.get("do", "")})
        return StreamingResponse(_lines(engine, asked))

    return Starlette(routes=[Route("/health", health), Route("/count/{name}", count)])


async def _lines(engine: EngineClient, request: Request) -> AsyncIterator[str]:
    yield "begun\n"
    try:
        async for output in engine.generate(request):
            yield f"{output.tokens[0]}\n"
        yield "done\n"
    except EngineError as error:
        yield f"error: {error}\n"
