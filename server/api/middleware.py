"""Around every route: the request's id, the key, the error of last resort, and the count of replies. It knows no route."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnout.server.api.errors import GONE, ApiError, reply
from turnout.server.api.metrics import Metrics

OPEN = {"/health", "/ping", "/metrics"}  # routes that need no key: probes and scrapers have none
PLAIN_ID = re.compile(rb"[\x21-\x7e]{1,256}")  # an id from a client that may go into a header and a log line

log = logging.getLogger("turnout.server")


class RequestMiddleware:
    """ASGI, outside of all routes."""

    def __init__(self, app: ASGIApp, metrics: Metrics, api_key: str | None) -> None:
        self._app, self._metrics = app, metrics
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, began, status = dict(scope["headers"]), time.perf_counter(), 0
        given = headers.get(b"x-request-id", b"")
        request_id = given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if self._allows(scope, headers):
                await self._app(scope, receive, tagged)
            else:
                error = ApiError(
                    401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
                )
                await reply(error)(scope, receive, tagged)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status:
                raise  # too late for an error reply: the server closes the connection
            error = ApiError(500, "the server failed on this request; its log says why", code="internal_error")
            await reply(error)(scope, receive, tagged)
        finally:
            handler = getattr(scope.get("route"), "path", "none")  # one series for all unknown paths
            self._metrics.http(handler, scope["method"], status or GONE, time.perf_counter() - began)

    def _allows(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        if self._expected is None or scope["path"] in OPEN:
            return True
        return hmac.compare_digest(headers.get(b"authorization", b""), self._expected)
