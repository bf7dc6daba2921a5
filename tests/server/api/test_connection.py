"""Connections at their limits: endless heads, half requests, too many, half-closed; with each parser there is."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from callers import live, until
from starlette.types import Receive, Scope, Send

from turnout.server.api import connection
from turnout.server.api.connection import MAX_HEAD, protocol

Open = Callable[..., socket.socket]


class App:
    """Answers after `pause` seconds; notes who left first."""

    def __init__(self) -> None:
        self.pause, self.left, self.asked = 0.0, 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        if message["type"] == "http.disconnect":
            self.left += 1
            return
        gone = asyncio.create_task(receive())
        done, _ = await asyncio.wait([gone], timeout=self.pause)
        if done:
            self.left += 1
            return
        gone.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture(params=["h11", "httptools"])
def server(request: pytest.FixtureRequest, app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Connections to the app behind the parser, with limits."""
    if request.param == "h11":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        pytest.importorskip("httptools")
    with ExitStack() as stack:
        urls: dict[tuple[float, int | None], str] = {}

        def open_one(request_timeout: float = 60, max_connections: int | None = None) -> socket.socket:
            limits = request_timeout, max_connections
            if limits not in urls:
                urls[limits] = stack.enter_context(live(app, protocol(*limits)))
            port = int(urls[limits].rpartition(":")[2])
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))

        yield open_one


def answer(one: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    parts = []
    try:
        while part := one.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize("start", [b"", HEAD + b"content-length: 2\r\n\r\nab"], ids=["first", "after another request"])
def test_an_endless_head_ends_at_its_bound(server: Open, app: App, start: bytes) -> None:
    one, sent = server(), 0
    one.sendall(start + HEAD + b"x-long: ")
    with pytest.raises(OSError):
        while sent < 50 * MAX_HEAD:
            one.sendall(b"a" * 16384)
            sent += 16384
            time.sleep(0.001)
    assert app.asked == bool(start)


def test_long_bodies_and_many_requests_on_one_connection_are_no_head(server: Open, app: App) -> None:
    one = server()
    for _ in range(3):
        one.sendall(HEAD + b"content-length: 300000\r\n\r\n" + b"a" * 300_000)
        got = b""
        while not got.endswith(b"ok"):
            got += one.recv(65536)
        assert got.startswith(b"HTTP/1.1 200")
    assert app.asked == 3


@pytest.mark.parametrize(
    "sent", [b"", b"GET /hea", HEAD + b"content-length: 100\r\n\r\nhalf"], ids=["none", "head", "body"]
)
def test_half_a_request_is_given_up_after_its_time(server: Open, sent: bytes) -> None:
    one = server(request_timeout=0.1)
    one.sendall(sent)
    assert b"server.request_timeout" in answer(one) or b"content-length" in sent


def test_a_slow_answer_is_no_half_request(server: Open, app: App) -> None:
    one, app.pause = server(request_timeout=0.1), 0.4
    one.sendall(HEAD + b"content-length: 2\r\nconnection: close\r\n\r\nab")
    assert answer(one).endswith(b"ok")


def test_connections_beyond_the_limit_are_told(server: Open) -> None:
    kept = [server(max_connections=3) for _ in range(3)]
    for one in kept:
        one.sendall(HEAD + b"\r\n")
        assert one.recv(65536).startswith(b"HTTP/1.1 200")
    assert b"503" in (told := answer(server(max_connections=3))) and b"server.max_connections" in told
    kept.pop().close()
    until(lambda: b"503" not in _asked(server(max_connections=3)))


def _asked(one: socket.socket) -> bytes:
    one.sendall(HEAD + b"connection: close\r\n\r\n")
    return answer(one)


def test_who_closes_the_sending_half_still_gets_the_answer(server: Open, app: App) -> None:
    one, app.pause = server(), 0.3
    one.sendall(HEAD + b"content-length: 2\r\n\r\nab")
    one.shutdown(socket.SHUT_WR)
    got = answer(one)
    assert got.endswith(b"ok") and b"HTTP/1.1 200" in got and app.left == 0


def test_who_closes_the_whole_connection_is_noticed(server: Open, app: App) -> None:
    one, app.pause = server(), 20
    one.sendall(HEAD + b"content-length: 2\r\n\r\nab")
    until(lambda: app.asked == 1)
    one.close()
    until(lambda: app.left == 1)


def test_the_limit_on_open_files_bounds_connections_where_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.resource, "getrlimit", lambda kind: (1000, 1000))
    made: Any = protocol(60, None)
    assert made.max_connections == 1000 - connection.SPARE_FILES
