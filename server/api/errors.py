"""Errors as clients of the OpenAI API read them: `{"error": {"message", "type", "param", "code"}}`, always all four keys.

It knows no route and no engine; `ApiError` is raised anywhere behind a route and becomes the reply.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Scope

log = logging.getLogger("turnout.server")

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
GONE = 499  # nobody reads it: the client closed the connection
SHOWN = 80  # characters of a client's value that a message repeats


class ApiError(Exception):
    """A refusal or failure with its HTTP status. `code` is a word for programs, never a number."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """The client closed the connection while its answer was being made."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(name: str, remedy: str, param: str | None = None) -> ApiError:
    """For what the OpenAI API or its extensions offer and this server does not: refused by name, never dropped. `param`: the
    field, where `name` says more than that."""
    return bad_request(f"{name} is not supported by this server yet: {remedy}", param or name, "unsupported_parameter")


def unavailable(why: str) -> ApiError:
    return ApiError(503, f"the server cannot answer now: {why}", code="unavailable", retry_after=5)


def invalid(error: ValidationError) -> ApiError:
    """The first faults pydantic found, one clause each: the field, the rule and the value."""
    faults = error.errors(include_url=False, include_context=False)
    clauses = [_clause(fault["loc"], fault["msg"], fault["type"], fault["input"]) for fault in faults[:3]]
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    param = _path(faults[0]["loc"]) or None
    return bad_request(
        "; ".join(clauses) + more, param, "invalid_json" if faults[0]["type"] == "json_invalid" else None
    )


def _clause(place: Sequence[int | str], message: str, kind: str, value: object) -> str:
    path = _path(place)
    if kind == "json_invalid":
        return f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}"
    if kind == "missing":
        return f"{path} is required"
    if kind in ("value_error", "assertion_error"):  # our own rules: they say which value is wrong
        return f"{path}: {message.removeprefix('Value error, ')}"
    if not path:
        return f"the body must be a JSON object, got {show(value)}"
    return f"{path}: {message[:1].lower()}{message[1:]}, got {show(value)}"


def _path(place: Sequence[int | str]) -> str:
    """`messages[0].role` for ("messages", 0, "role")."""
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def show(value: object) -> str:
    """A value as it stands in a message: one line, not long, whatever a client sent."""
    if isinstance(value, (list, dict)) and len(value) > SHOWN:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    if isinstance(value, str):
        text = json.dumps(value[: SHOWN + 1])
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        text = str(value) if abs(value) < 10**SHOWN else "a very large number"
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def reply(error: ApiError) -> Response:
    """The error as an HTTP response."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    # ASCII JSON: a message may repeat a lone surrogate that a client sent, which UTF-8 cannot write
    return Response(json.dumps(error.body), error.status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Give every error that a route or the router raises the agreed form."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return reply(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        path = request.url.path
        hint = (
            f"; did you mean /v1{path}? The base URL of clients ends in /v1"
            if _has(app, f"/v1{path}", request.scope)
            else ""
        )
        messages = {404: f"there is no {where}{hint}", 405: f"{where} is not a method of this path"}
        response = reply(ApiError(error.status_code, messages.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        return response

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        faults = error.errors()
        return reply(bad_request("; ".join(f"{_path(f['loc'])}: {f['msg']}" for f in faults[:3])))

    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(ClientGone, on_gone)
    app.add_exception_handler(ClientDisconnect, on_gone)


def _has(app: FastAPI, path: str, scope: Scope) -> bool:
    """Whether there is a route for this path, whatever the method."""
    return any(route.matches({**scope, "path": path})[0] is not Match.NONE for route in app.routes)
