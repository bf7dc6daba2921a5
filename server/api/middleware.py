"""Around every route: the request's id, the key, the host it was sent to, the error of last resort, and the count of
replies. It knows no route."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnout.server.api.errors import GONE, ApiError, reply, show
from turnout.server.api.metrics import Metrics
from turnout.server.config import ServerConfig

OPEN = {"/health", "/ping", "/metrics"}  # routes that need no key: probes and scrapers have none
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}  # counted by name; a client may invent others
PRIVATE = ("localhost", "internal", "local", "test", "home.arpa")  # ends of names that nobody can register
PLAIN_ID = re.compile(rb"[\x21-\x7e]{1,256}")  # an id from a client that may go into a header and a log line

log = logging.getLogger("turnout.server")


class RequestMiddleware:
    """ASGI, outside of all routes."""

    def __init__(self, app: ASGIApp, metrics: Metrics, config: ServerConfig) -> None:
        self._app, self._metrics = app, metrics
        self._key = None if config.api_key is None else config.api_key.encode()
        self._hosts = {name.lower() for name in config.allowed_hosts}
        # a web page anywhere can point a name of its own at this machine: what nobody else reaches needs a look at the name
        self._private = self._key is None and is_loopback(config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, began, status = dict(scope["headers"]), time.perf_counter(), 0
        if not scope["path"].startswith("/"):  # in absolute form, as proxies are asked
            scope["path"] = urlsplit(scope["path"]).path or "/"
            scope["raw_path"] = urlsplit(scope["raw_path"]).path or b"/"
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
            error = self._refusal(scope, headers)
            if error is None:
                await self._app(scope, receive, tagged)
            else:
                await reply(error)(scope, receive, tagged)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status:
                raise  # too late for an error reply: the server closes the connection
            error = ApiError(500, "the server failed on this request; its log says why", code="internal_error")
            await reply(error)(scope, receive, tagged)
        finally:
            handler = getattr(scope.get("route"), "path", "none")  # one series for all unknown paths
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.http(handler, method, status or GONE, time.perf_counter() - began)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        """Why this request is not for any route."""
        if self._private and not self._is_ours(headers.get(b"host", b"").decode("latin-1")):
            return ApiError(
                403,
                f"the Host header names {show(headers[b'host'].decode('latin-1'))}, which may be a web page's trick to reach "
                "this machine: add it to server.allowed_hosts, or set server.api_key",
                code="host_not_allowed",
            )
        if self._key is None or scope["path"] in OPEN:
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key):
            return None
        return ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")

    def _is_ours(self, host: str) -> bool:
        """Whether no stranger can own this name: it is an address, of one label, or of an end that is not for sale."""
        name = urlsplit(f"//{host}").hostname if host else None
        if name is None or "*" in self._hosts or name in self._hosts:
            return True
        return "." not in name or ":" in name or name.endswith(tuple(f".{end}" for end in PRIVATE)) or is_address(name)


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether `server.host` is reached from this machine alone."""
    return host == "localhost" or (is_address(host) and ip_address(host).is_loopback)
