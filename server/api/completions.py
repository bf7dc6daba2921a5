"""POST /v1/completions: prompts as text or ids are continued, whole or as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from turnout.core.types import EngineInfo, Logprobs
from turnout.server.api.choice import Choice, Delta, Prompt
from turnout.server.api.errors import bad_request
from turnout.server.api.generation import Job
from turnout.server.api.marks import Pieces, TextMarks, prompt_logprobs
from turnout.server.api.sampling import COMPLETION_TOKENS, check_ids, max_tokens_of, sampling_of
from turnout.server.api.schema import CompletionRequest, parse, read_body
from turnout.server.api.service import Service
from turnout.server.api.streams import DONE, EventStream, unless_gone
from turnout.server.api.wire import Chunks, head_of, quote

MAX_CHOICES = 4096  # in one request


def completion_routes(service: Service) -> APIRouter:
    """The route, for this service."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        since = time.monotonic()
        body = parse(CompletionRequest, await read_body(request))
        body.request_id = body.request_id or request.state.request_id
        service.check_model(body.model)
        service.check_able()
        job = await _job(service, body, since)
        head = head_of(service, body, "cmpl", "text_completion")
        answer = Answer(service, body, job, head)
        if body.stream:
            return EventStream(job.admitted(), answer.events(), answer.opening.encode())
        return JSONResponse(await unless_gone(request, answer.whole()))

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
    samplings = [
        sampling_of(
            body,
            service.defaults,
            service.text,
            info,
            max_tokens=max_tokens_of(body.limit, COMPLETION_TOKENS, len(prompt.ids), info),
            logprobs=body.logprobs,
            prompt_logprobs=max(wanted, default=None),
        )
        for prompt in prompts
    ]
    return Job(service, body, prompts, samplings, since)


async def _prompts(service: Service, body: CompletionRequest, info: EngineInfo) -> list[Prompt]:
    texts = [given for given in body.prompt if isinstance(given, str)]
    if texts:
        encoded = await service.encode(texts, add_special_tokens=body.add_special_tokens)
        prompts = [Prompt(ids, text) for ids, text in zip(encoded, texts, strict=True)]
    else:
        prompts = []
        for ids in body.prompt:
            assert isinstance(ids, list)
            max_tokens_of(body.limit, COMPLETION_TOKENS, len(ids), info)  # one that is too long is not even looked at
            check_ids(ids, info.vocab_size, "prompt")
            prompts.append(Prompt(ids, service.text.decode(ids, skip_special_tokens=False) if body.echo else ""))
    if not all(prompt.ids for prompt in prompts):
        raise bad_request("the prompt is empty: it needs at least one token", "prompt")
    return prompts


class Part:
    """What one choice still owes or has gathered."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self.marks = TextMarks(
            service.names,
            body.logprobs or 0,
            skip_special_tokens=body.skip_special_tokens,
            as_ids=body.return_tokens_as_token_ids,
        )
        self.scores: list[Logprobs] = []
        self.echoed, self.introduced = not body.echo, False
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.end = Delta()


class Answer:
    """One request's reply."""

    def __init__(self, service: Service, body: CompletionRequest, job: Job, head: dict[str, object]) -> None:
        self._service, self._body, self._job, self._head = service, body, job, head
        self._parts = [Part(service, body) for _ in job.choices]
        self._chunks = Chunks(head, body, job)

    async def whole(self) -> dict[str, object]:
        """The reply that is not a stream."""
        with self._job.admitted():
            async for choice, delta in self._job.deltas():
                part = self._parts[choice.index]
                part.text.append(delta.text)
                part.tokens += delta.tokens
                part.logprobs += delta.logprobs
                part.scores += delta.prompt_logprobs
                if delta.finish:
                    part.end = delta
        choices = [self._choice(*pair) for pair in enumerate(self._job.answers)]
        return {**self._head, "choices": choices, "usage": self._job.usage}

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        part, body, prompt = self._parts[choice.index], self._body, choice.prompt
        scores = self._parts[choice.leader].scores
        fields: dict[str, object] = {
            "index": index,
            "text": (prompt.text if body.echo else "") + "".join(part.text),
            "logprobs": None,
            "finish_reason": part.end.finish,
            "stop_reason": part.end.stop_reason,
        }
        if body.logprobs is not None:
            before = part.marks.prompt(prompt.ids[0], scores, prompt.text) if body.echo else {}
            made = part.marks.of(part.logprobs)
            fields["logprobs"] = {name: before.get(name, []) + made[name] for name in made}
        if body.return_token_ids:
            fields |= {"prompt_token_ids": prompt.ids, "token_ids": part.tokens}
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
            self._parts[choice.index].echoed = True
            events.append(self._event(choice, choice.prompt.text, None, Delta()))
        return "".join(events)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events after the opening."""
        wants_marks, wants_ids = self._body.logprobs is not None, self._body.return_token_ids
        async for choice, delta in self._job.deltas():
            part, events = self._parts[choice.index], ""
            part.scores += delta.prompt_logprobs
            if not part.echoed and (delta.tokens or delta.finish):
                part.echoed = True
                scores = self._parts[choice.leader].scores
                marked = part.marks.prompt(choice.prompt.ids[0], scores, choice.prompt.text)
                events = self._event(choice, choice.prompt.text, marked, Delta())
            marks = part.marks.of(delta.logprobs) if wants_marks and delta.logprobs else None
            if delta.text or marks or delta.finish or (wants_ids and delta.tokens):
                events += self._event(choice, delta.text, marks, delta)
            if events:
                yield events.encode()
        yield self._chunks.last().encode() + DONE

    def _event(self, choice: Choice, text: str, marks: Pieces | None, delta: Delta) -> str:
        fields = f'{{"index":{choice.index},"text":{quote(text)},"logprobs":{json.dumps(marks) if marks else "null"}'
        if delta.finish:
            fields += f',"finish_reason":"{delta.finish}","stop_reason":{json.dumps(delta.stop_reason)}'
        else:
            fields += ',"finish_reason":null'
        if self._body.return_token_ids:
            fields += f',"token_ids":{json.dumps(delta.tokens)}'
            if not self._parts[choice.index].introduced:
                self._parts[choice.index].introduced = True
                fields += f',"prompt_token_ids":{json.dumps(choice.prompt.ids)}'
        return self._chunks.event(fields + "}")
