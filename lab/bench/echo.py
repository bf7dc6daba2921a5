"""A server that computes nothing, to measure the generator on: it answers at once with as many events as tokens wanted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading

EVENT = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, request after request."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            asked = json.loads(await reader.readexactly(length))
            body = EVENT * asked["max_tokens"] + LAST
            writer.write(HEAD % len(body) + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def main() -> None:
    """Serve on a free port, which is printed, until standard input ends."""

    def leave() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 24)
        print(server.sockets[0].getsockname()[1], flush=True)
        threading.Thread(target=leave, daemon=True).start()
        await server.serve_forever()

    asyncio.run(serve())
