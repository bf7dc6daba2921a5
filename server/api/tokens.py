"""POST /tokenize and /detokenize, in vLLM's form, under /v1 too."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from turnout.server.api.chat import chat_prompt
from turnout.server.api.sampling import check_ids
from turnout.server.api.schema import Detokenize, Tokenize, read_body
from turnout.server.api.service import Service


def token_routes(service: Service) -> APIRouter:
    """The routes, for this service."""
    router = APIRouter()

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        raw = await read_body(request)
        body = await service.parse(Tokenize, raw)
        service.check_model(body.model)
        if body.prompt is None:
            ids = (await chat_prompt(service, body, len(raw))).ids
        else:
            (ids,) = await service.encode([body.prompt], add_special_tokens=body.add_special_tokens)
        strings = [service.names.of(token)[0] for token in ids] if body.return_token_strs else None
        length = service.client.info.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings})

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await service.parse(Detokenize, await read_body(request))
        service.check_model(body.model)

        def decode() -> str:
            check_ids(body.tokens, service.client.info.vocab_size, "tokens")
            return service.text.decode(body.tokens, skip_special_tokens=False)

        text = await service.compute(len(body.tokens), decode)
        return JSONResponse({"prompt": text})

    return router
