"""Connections as uvicorn reads them, bounded: heads, the time a request may take to arrive, how many there may be.

It knows no route. Whichever parser is installed, a client that sends an endless head, half a request or nothing at all costs
a bounded amount of memory for a bounded time. A client may close its sending half once it has asked, as HTTP allows.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import resource
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Base = asyncio.Protocol
else:
    _Base = object

MAX_BODY = 16 << 20  # bytes; a million tokens of text are about five million
MAX_HEAD = 64 << 10  # bytes of a request line and its headers
SPARE_FILES = 64  # descriptors that connections leave for everything else
PROBES = (0.1, 1.0, 5.0)  # seconds between looks whether a client that closed its sending half still listens
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # allowed before any answer; one that is gone makes the next write fail
REFUSED = b"HTTP/1.1 %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"

log = logging.getLogger("turnout.server")


class _Bounded(_Base):
    """Goes in front of one of uvicorn's protocols. A request is being answered from its head's end on, as its `cycle`."""

    request_timeout: float
    max_connections: int
    cycle: Any
    loop: asyncio.AbstractEventLoop
    connections: set[Any]
    scope: Any
    transport: Any
    _timer: asyncio.TimerHandle | None = None
    _head = 0  # bytes since the last head ended, its request's body left out

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(b"503 Service Unavailable", b"too many connections: try again soon (server.max_connections)")
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        unread = before is not None and before.more_body  # of its body
        super().data_received(data)
        if self.cycle is not before or (unread and not before.response_complete):
            self._head = 0
        else:
            self._head += len(data)
            if self._head > (MAX_BODY if unread else MAX_HEAD) and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large", b"the headers are longer than %d bytes" % MAX_HEAD)
        if self.cycle is not None and not self.cycle.more_body:
            self._disarm()
        elif self._timer is None:
            self._arm()

    def eof_received(self) -> bool:
        """The client sends no more. It may still read, unless it is gone: writing tells."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        if self.transport.get_extra_info("sslcontext") is not None:
            return False
        cycle.keep_alive = False
        self._probe(cycle, 0)
        return True

    def _probe(self, cycle: Any, count: int) -> None:
        if cycle.response_started or cycle.response_complete or self.transport.is_closing():
            return  # what is written from here on tells
        self.transport.write(CONTINUE)
        self.loop.call_later(PROBES[min(count, len(PROBES) - 1)], self._probe, cycle, count + 1)

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.request_timeout, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.more_body):
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # in the middle of a body: its reader hears of it
        else:
            self._refuse(b"408 Request Timeout", b"the request did not arrive in time (server.request_timeout)")

    def _refuse(self, status: bytes, why: bytes) -> None:
        self.transport.write(REFUSED % (status, len(why), why))
        self.transport.close()


def protocol(request_timeout: float, max_connections: int | None) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1, with the faster parser where it is installed."""
    base: type[asyncio.Protocol]
    if importlib.util.find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as base
    else:
        from uvicorn.protocols.http.h11_impl import H11Protocol as base
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, files - SPARE_FILES) if max_connections is None else max_connections
    return type("Connection", (_Bounded, base), {"request_timeout": request_timeout, "max_connections": most})
