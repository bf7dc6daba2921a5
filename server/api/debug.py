"""Routes that show what the engine is doing and why: /debug/requests and /debug/engine, where server.debug=true.

They show ids, lengths and reasons, no text; whoever may call /v1 may call them.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from turnout.server.api.errors import ApiError, show, unavailable
from turnout.server.api.service import Service
from turnout.server.engine.bridge import EngineError


def debug_routes(service: Service) -> APIRouter:
    """All of them answer 404 while server.debug is false."""
    router = APIRouter(prefix="/debug")

    async def ask(topic: str, name: str = "") -> object:
        if not service.config.debug:
            raise ApiError(404, "debug routes are off: start the server with server.debug=true", code="debug_off")
        try:
            return await service.client.ask(topic, name)
        except EngineError as error:
            raise unavailable(str(error)) from error

    @router.get("/engine")
    async def engine() -> Response:
        return JSONResponse(await ask("engine"))

    @router.get("/requests")
    async def requests() -> Response:
        return JSONResponse({"requests": await ask("requests")})

    @router.get("/requests/{name:path}")
    async def request(name: str) -> Response:
        found = await ask("request", name)
        if not found:
            raise ApiError(
                404,
                f"no request {show(name)} is open or ended lately; GET /debug/requests lists those that are known",
                code="request_not_found",
            )
        return JSONResponse({"requests": found})

    return router
