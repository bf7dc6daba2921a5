"""The FastAPI application: routes of the OpenAI API and of operation, over an engine that is ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from turnout.server.api import errors
from turnout.server.api.chat import chat_routes
from turnout.server.api.completions import completion_routes
from turnout.server.api.debug import debug_routes
from turnout.server.api.errors import unavailable
from turnout.server.api.middleware import RequestMiddleware
from turnout.server.api.service import Service
from turnout.server.api.tokens import token_routes
from turnout.server.config import ServerConfig
from turnout.server.engine.bridge import EngineClient
from turnout.server.text.parsers import Parsers
from turnout.server.text.tokenizer import Text

NO_PARSERS = Parsers()


def create_app(client: EngineClient, text: Text, config: ServerConfig, parsers: Parsers = NO_PARSERS) -> FastAPI:
    """Raises ValueError when the model's generation_config.json holds a value out of range."""
    service = Service(client, text, config, parsers)
    app = FastAPI(title="Turnout", openapi_url=None)  # bodies are read by `schema`, so a generated page would be empty
    errors.install(app)
    for routes in (completion_routes, chat_routes, token_routes, operation_routes, debug_routes):
        app.include_router(routes(service))
    app.add_middleware(RequestMiddleware, metrics=service.metrics, config=config)
    if config.cors_origins:  # outermost, so that refusals can be read too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


def operation_routes(service: Service) -> APIRouter:
    """What clients and operators ask about the server itself."""
    router, client = APIRouter(), service.client

    @router.api_route("/health", methods=["GET", "HEAD"])
    @router.api_route("/ping", methods=["GET", "HEAD"])
    async def health() -> Response:
        trouble = client.trouble()
        if trouble is not None:
            raise unavailable(trouble)
        return JSONResponse({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(service)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(_card(service))

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": client.info.versions.get("turnout", "unknown")})

    @router.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": service.metrics.in_flight})

    @router.get("/server_info")
    async def server_info() -> Response:
        return JSONResponse(_server_info(service))

    return router


def _card(service: Service) -> dict[str, object]:
    info = service.client.info
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "turnout",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
    }


def _server_info(service: Service) -> dict[str, object]:
    """All that produced an answer: the engine with its composition, and the sampling that holds by default."""
    info = asdict(service.client.info)
    info["composition"] = _without_secrets(info["composition"])
    return info | {
        "served_model_name": service.model,
        "sampling_defaults": dict(service.defaults),
        "parsers": {"tool_parser": service.parsers.tool_name, "reasoning_parser": service.parsers.reasoning_name},
        "server": _without_secrets(asdict(service.config)),
        "stats": asdict(service.client.stats),
    }


def _without_secrets(values: Mapping[str, object]) -> dict[str, object]:
    """The same without keys of any depth that a stranger may not read."""
    return {
        name: "***"
        if name == "api_key" and value is not None
        else _without_secrets(value)
        if isinstance(value, Mapping)
        else value
        for name, value in values.items()
    }
