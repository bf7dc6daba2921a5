"""Callers of the application: in this process, and over a real connection."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from turnout.server.api.connection import protocol


@dataclass
class Reply:
    """An HTTP reply, read as a stream of events where it is one."""

    status: int
    headers: httpx.Headers
    raw: bytes

    @property
    def json(self) -> Any:
        return strict_json(self.raw.decode())

    @property
    def good(self) -> Any:
        assert self.status == 200, self.raw
        return self.json

    @property
    def error(self) -> dict[str, Any]:
        """The error object, its form checked."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
        assert all(error[key] is None or isinstance(error[key], str) for key in ("param", "code"))
        return error

    @property
    def events(self) -> list[str]:
        """The data of each event."""
        assert self.status == 200, self.raw
        *blocks, rest = self.raw.decode().split("\n\n")
        assert not rest
        lines = [line for block in blocks for line in block.split("\n")]
        assert all(line.startswith(("data: ", ":")) for line in lines)
        return [line.removeprefix("data: ") for line in lines if not line.startswith(":")]

    @property
    def chunks(self) -> list[Any]:
        *chunks, done = self.events
        assert done == "[DONE]"
        return [strict_json(chunk) for chunk in chunks]

    def choices(self, index: int = 0) -> list[Any]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in self.choices(index))


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


class Api:
    """The application, called without a network."""

    def __init__(self, app: FastAPI, model: str) -> None:
        self.app, self.model = app, model

    def call(self, method: str, path: str, **rest: Any) -> Reply:
        return self.together([(method, path, rest)])[0]

    def together(self, calls: list[tuple[str, str, dict[str, Any]]]) -> list[Reply]:
        """Replies to requests made at once."""

        async def work() -> list[Reply]:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                answers = await asyncio.gather(*(client.request(method, path, **rest) for method, path, rest in calls))
                return [Reply(a.status_code, a.headers, a.content) for a in answers]

        return asyncio.run(work())

    def get(self, path: str, **rest: Any) -> Reply:
        return self.call("GET", path, **rest)

    def post(self, path: str, body: Any, **rest: Any) -> Reply:
        return self.call("POST", path, json=body, **rest)

    def complete(self, prompt: Any = "The sea is", **fields: Any) -> Reply:
        return self.post("/v1/completions", {"model": self.model, "prompt": prompt, "temperature": 0} | fields)

    def chat(self, messages: Any = "Tell me about the sea.", **fields: Any) -> Reply:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.post("/v1/chat/completions", {"model": self.model, "messages": messages, "temperature": 0} | fields)

    def ask(self, path: str, **fields: Any) -> Reply:
        """The same request for either endpoint."""
        return self.complete(**fields) if path == "/v1/completions" else self.chat(**fields)


BOTH = ("/v1/completions", "/v1/chat/completions")


@contextmanager
def live(app: ASGIApp, http: type[asyncio.Protocol] | None = None) -> Iterator[str]:
    """The application behind uvicorn on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=http or protocol(60, None), log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
