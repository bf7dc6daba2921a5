"""POST /v1/completions: prompts as text or ids are continued, whole or as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from turnout.core.types import EngineInfo, Logprobs
from turnout.server.api import fields
from turnout.server.api.choice import Choice
from turnout.server.api.errors import bad_request
from turnout.server.api.generation import Job
from turnout.server.api.logprobs import CompletionLogprobs, Pieces, prompt_logprobs
from turnout.server.api.sampling import COMPLETION_TOKENS, check_ids, max_tokens_of, sampling_of
from turnout.server.api.schema import CompletionRequest, read_body
from turnout.server.api.service import CHOICE_COST, LOGPROBS_COST, Service
from turnout.server.api.streams import DONE, EventStream, unless_gone
from turnout.server.api.wire import Chunks, head_of, quote
from turnout.server.text.output import Collected, Delta, Prompt

MAX_CHOICES = 4096  # in one request


def completion_routes(service: Service) -> APIRouter:
    """The route, for this service."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        since = time.monotonic()
        body = await service.parse(CompletionRequest, await read_body(request))
        body.request_id = body.request_id or request.state.request_id
        service.check_model(body.model)
        service.check_able()
        job = await _job(service, body, since)
        head = head_of(service, body, "cmpl", "text_completion")
        reply = CompletionReply(service, body, job, head)
        if body.stream:
            return EventStream(job.admitted(), reply.events(), reply.opening.encode())
        return Response(await unless_gone(request, reply.whole()), media_type="application/json")

    return router


async def _job(service: Service, body: CompletionRequest, since: float) -> Job:
    if len(body.prompt) * body.num_made > MAX_CHOICES:
        raise bad_request(
            f"{len(body.prompt)} prompts with {body.num_made} answers each are more than {MAX_CHOICES} answers: "
            "send several requests",
            "n",
        )
    info = service.client.info
    prompts = await _prompts(service, body, info)
    wanted = [k for k in (body.logprobs if body.echo else None, body.prompt_logprobs) if k is not None]

    def job() -> Job:
        samplings = [
            sampling_of(
                body,
                service.defaults,
                service.text,
                info,
                max_tokens=max_tokens_of(body.limit, COMPLETION_TOKENS, len(prompt.ids), info),
                logprobs=body.logprobs,
                prompt_logprobs=max(wanted, default=None),
                whitespace=service.config.whitespace,
            )
            for prompt in prompts
        ]
        return Job(service, body, prompts, samplings, since)

    return await service.compute(len(prompts) * body.num_made * CHOICE_COST, job)


async def _prompts(service: Service, body: CompletionRequest, info: EngineInfo) -> list[Prompt]:
    texts = [given for given in body.prompt if isinstance(given, str)]
    if texts:
        encoded = await service.encode(texts, add_special_tokens=body.add_special_tokens)
        prompts = [Prompt(ids, text) for ids, text in zip(encoded, texts, strict=True)]
    else:
        size = sum(map(len, body.prompt))
        prompts = await service.compute(size, lambda: [_of_ids(service, body, ids, info) for ids in body.prompt])
    if not all(prompt.ids for prompt in prompts):
        raise bad_request("the prompt is empty: it needs at least one token", "prompt")
    return prompts


def _of_ids(service: Service, body: CompletionRequest, ids: fields.Prompt, info: EngineInfo) -> Prompt:
    assert isinstance(ids, list)
    max_tokens_of(body.limit, COMPLETION_TOKENS, len(ids), info)  # one that is too long is not even looked at
    check_ids(ids, info.vocab_size, "prompt")
    return Prompt(ids, service.text.decode(ids, skip_special_tokens=False) if body.echo else "")


class CompletionReply:
    """One request's reply."""

    def __init__(self, service: Service, body: CompletionRequest, job: Job, head: dict[str, object]) -> None:
        self._service, self._body, self._job, self._head = service, body, job, head
        self._chunks = Chunks(head, body, job)
        self._logprobs = [self._new_logprobs() for _ in job.choices]  # by choice, as the two below
        self._scores: list[list[Logprobs]] = [[] for _ in job.choices]  # of the prompt, by a stream's leaders
        self._echoed = [not body.echo for _ in job.choices]
        self._introduced = [False for _ in job.choices]  # the prompt's ids went out

    def _new_logprobs(self) -> CompletionLogprobs:
        body = self._body
        return CompletionLogprobs(
            self._service.names,
            body.logprobs or 0,
            skip_special_tokens=body.skip_special_tokens,
            as_ids=body.return_tokens_as_token_ids,
        )

    async def whole(self) -> bytes:
        """The reply that is not a stream."""
        collected = await self._job.collected()
        size = sum(len(one.logprobs) + len(one.prompt_logprobs) for one in collected)
        return await self._service.compute(size * LOGPROBS_COST, lambda: to_json(self._fields(collected)))

    def _fields(self, collected: Sequence[Collected]) -> dict[str, object]:
        choices = [
            self._choice(index, choice, collected[choice.index], collected[choice.leader].prompt_logprobs)
            for index, choice in enumerate(self._job.answers)
        ]
        return {**self._head, "choices": choices, "usage": self._job.usage}

    def _choice(self, index: int, choice: Choice, answer: Collected, scores: Sequence[Logprobs]) -> dict[str, object]:
        body, prompt, logprobs = self._body, choice.prompt, self._logprobs[choice.index]
        fields: dict[str, object] = {
            "index": index,
            "text": (prompt.text if body.echo else "") + answer.text,
            "logprobs": None,
            "finish_reason": answer.finish,
            "stop_reason": answer.stop_reason,
        }
        if body.logprobs is not None:
            before = logprobs.prompt(prompt.ids[0], scores, prompt.text) if body.echo else {}
            made = logprobs.of(answer.logprobs)
            fields["logprobs"] = {name: before.get(name, []) + made[name] for name in made}
        if body.return_token_ids:
            fields |= {"prompt_token_ids": prompt.ids, "token_ids": answer.tokens}
        if body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._service.names, scores, body.prompt_logprobs)
        return fields

    @property
    def opening(self) -> str:
        """Echoed prompts that need no log-probabilities: they are known before the engine begins."""
        if not self._body.echo or self._body.logprobs is not None:
            return ""
        events = []
        for choice in self._job.choices:
            self._echoed[choice.index] = True
            events.append(self._event(choice, choice.prompt.text, None, Delta()))
        return "".join(events)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events after the opening."""
        wants_logprobs, wants_ids = self._body.logprobs is not None, self._body.return_token_ids
        async for choice, delta in self._job.deltas():
            events = ""
            self._scores[choice.index] += delta.prompt_logprobs
            if not self._echoed[choice.index] and (delta.tokens or delta.finish):
                self._echoed[choice.index] = True
                events = await self._echo(choice)
            pieces = self._logprobs[choice.index].of(delta.logprobs) if wants_logprobs and delta.logprobs else None
            if delta.text or pieces or delta.finish or (wants_ids and delta.tokens):
                events += self._event(choice, delta.text, pieces, delta)
            if events:
                yield events.encode()
        yield self._chunks.last().encode() + DONE

    async def _echo(self, choice: Choice) -> str:
        """The prompt with its log-probabilities: large where the prompt is."""
        prompt, scores = choice.prompt, self._scores[choice.leader]

        def echo() -> str:
            pieces = self._logprobs[choice.index].prompt(prompt.ids[0], scores, prompt.text)
            return self._event(choice, prompt.text, pieces, Delta())

        return await self._service.compute(len(scores) * LOGPROBS_COST, echo)

    def _event(self, choice: Choice, text: str, pieces: Pieces | None, delta: Delta) -> str:
        event = f'{{"index":{choice.index},"text":{quote(text)},"logprobs":{json.dumps(pieces) if pieces else "null"}'
        if delta.finish:
            event += f',"finish_reason":"{delta.finish}","stop_reason":{json.dumps(delta.stop_reason)}'
        else:
            event += ',"finish_reason":null'
        if self._body.return_token_ids:
            event += f',"token_ids":{json.dumps(delta.tokens)}'
            if not self._introduced[choice.index]:
                self._introduced[choice.index] = True
                event += f',"prompt_token_ids":{json.dumps(choice.prompt.ids)}'
        return self._chunks.event(event + "}")
