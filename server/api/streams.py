"""How an answer travels: as server-sent events, or whole; and how a client that leaves ends it. It knows no wire type.

A stream's head and first event wait for the engine's first word, so that a refusal still has its own HTTP status; but no
longer than `PATIENCE`, for clients give up on silence. A comment line goes out when nothing else did for `KEEP_ALIVE`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from turnout.server.api.errors import ClientGone, reply
from turnout.server.api.generation import failure_of

PATIENCE = 1.0  # seconds
KEEP_ALIVE = 10.0  # seconds
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


class EventStream(Response):
    """Sends `events`, each of them whole, after `opening`. Leaves `admission` and closes `events` on every way out."""

    def __init__(
        self, admission: AbstractContextManager[None], events: AsyncGenerator[bytes, None], opening: bytes = b""
    ) -> None:
        self._admission, self._events, self._opening = admission, events, opening
        self._turn = asyncio.Lock()
        self._begun = self._open = False  # the head is on its way; the head and the opening have gone
        self._last = 0.0
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        self._send = send
        try:
            with self._admission:
                await _race(self._pump(), receive, self._beat())
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001  the client is told, and what nobody foresaw is logged
            failure = failure_of(error)
            if not self._begun:
                return await reply(failure)(scope, receive, send)
            await self._write(b"data: " + json.dumps(failure.body).encode() + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await self._write(event)

    async def _beat(self) -> None:
        """Begin at last, then break long silences."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(PATIENCE)
        if not self._begun:
            await self._write(b"")
        while True:
            silence = loop.time() - self._last
            if silence >= KEEP_ALIVE:
                await self._write(b": keep-alive\n\n")
            else:
                await asyncio.sleep(KEEP_ALIVE - silence)

    async def _write(self, event: bytes) -> None:
        if not self._open:
            async with self._turn:
                if not self._open:
                    return await self._begin(event)
        self._last = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def _begin(self, event: bytes) -> None:
        self._begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": self._opening + event, "more_body": True})
        self._open, self._last = True, asyncio.get_running_loop().time()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises ClientGone, with `work` cancelled, when the client leaves first."""
    return await _race(work, request.receive)


async def _race(work: Coroutine[Any, Any, T], receive: Receive, *beside: Coroutine[Any, Any, None]) -> T:
    """Run `work`, and `beside` it the rest, until it is done or the client is gone."""
    main, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    tasks = [main, gone, *map(asyncio.ensure_future, beside)]
    try:
        await asyncio.wait((main, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if main.cancelled():
        raise ClientGone
    return main.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
