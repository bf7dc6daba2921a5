"""Time that passes only when nobody has anything to do, and a server that follows a script in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
Step = tuple[float, bytes | Exception]  # seconds after the last one, what comes then


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeping takes no time: when nothing is ready, the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def jump(timeout: float | None = None) -> Any:
            if timeout is not None and timeout > 0:
                self._now += timeout
                timeout = 0.0
            return select(timeout)

        self._selector.select = jump

    def time(self) -> float:
        return self._now


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run it on a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def event(text: str = "x", *, ids: Sequence[int] | None = None, finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = list(ids)
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def usage(num_tokens: int, cached: int = 0) -> bytes:
    details = {"completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": details}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def plain(delays: Sequence[float], status: int = 200) -> Script:
    """A token after each delay, then the end."""
    last = [(0.0, event("", finish="length") + usage(len(delays)) + DONE)]
    return Script(status, [*((delay, event()) for delay in delays), *last])


class Script:
    """What a server does with one request."""

    def __init__(self, status: int, steps: Sequence[Step], refuses: Exception | None = None) -> None:
        self.status, self.steps, self.refuses = status, steps, refuses


class ScriptedServer(httpx.AsyncBaseTransport):
    """Answers each request as `script` says, on the event loop's clock. `asked`: (when, body) of each."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Script]) -> None:
        self._script = script
        self.asked: list[tuple[float, dict[str, Any]]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.asked.append((asyncio.get_running_loop().time(), body))
        script = self._script(len(self.asked) - 1, body)
        if script.refuses is not None:
            raise script.refuses
        return httpx.Response(script.status, stream=Stream(script.steps))


class Stream(httpx.AsyncByteStream):
    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay, what in self._steps:
            await asyncio.sleep(delay)
            if isinstance(what, Exception):
                raise what
            yield what
