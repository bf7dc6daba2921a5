"""POST /v1/chat/completions: messages go through the model's chat template, the answer comes whole or as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from turnout.core.types import Logprobs
from turnout.server.api.choice import Choice, Delta, Prompt
from turnout.server.api.conversation import check_template_kwargs, check_tools, normalize
from turnout.server.api.errors import bad_request
from turnout.server.api.generation import Job
from turnout.server.api.marks import ChatMarks, prompt_logprobs
from turnout.server.api.sampling import max_tokens_of, sampling_of
from turnout.server.api.schema import ChatRequest, Templated, parse, read_body
from turnout.server.api.service import Service
from turnout.server.api.streams import DONE, EventStream, unless_gone
from turnout.server.api.wire import Chunks, head_of, quote


def chat_routes(service: Service) -> APIRouter:
    """The route, for this service."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        since = time.monotonic()
        raw = await read_body(request)
        body = parse(ChatRequest, raw)
        body.request_id = body.request_id or request.state.request_id
        service.check_model(body.model)
        service.check_able()
        job = await _job(service, body, len(raw), since)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        answer = Answer(service, body, job, head_of(service, body, "chatcmpl", kind))
        if body.stream:
            return EventStream(job.admitted(), answer.events(), answer.opening.encode())
        return JSONResponse(await unless_gone(request, answer.whole()))

    return router


async def chat_ids(service: Service, body: Templated, size: int, **options: object) -> list[int]:
    """The prompt a conversation makes; `size` is the request's, in bytes. Raises ApiError for what the template refuses.

    A prompt for the answer is added unless the last message is to be continued.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt contradict each other: send one of them",
            "continue_final_message",
        )
    check_template_kwargs(body.chat_template_kwargs)
    check_tools(body.tools)
    messages = normalize(body.messages)
    begins = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt

    def template() -> list[int]:
        return service.text.chat(
            messages,
            tools=body.tools or None,
            add_generation_prompt=begins,
            continue_final_message=body.continue_final_message,
            template_kwargs=options | body.chat_template_kwargs,
        )

    await service.check_length(sum(len(str(message["content"])) for message in messages), "messages")
    try:
        return await service.compute(size, template)
    except ValueError as error:
        raise bad_request(f"the model's chat template refused the messages: {error}", "messages") from None


async def _job(service: Service, body: ChatRequest, size: int, since: float) -> Job:
    options = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    ids, info = await chat_ids(service, body, size, **options), service.client.info
    if not ids:
        raise bad_request("the chat template makes an empty prompt of these messages: send some content", "messages")
    sampling = sampling_of(
        body,
        service.defaults,
        service.text,
        info,
        max_tokens=max_tokens_of(body.limit, None, len(ids), info),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    return Job(service, body, [Prompt(ids, continues=body.continue_final_message)], [sampling], since)


class Part:
    """What one choice has gathered."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.scores: list[Logprobs] = []
        self.end = Delta()


class Answer:
    """One request's reply."""

    def __init__(self, service: Service, body: ChatRequest, job: Job, head: dict[str, object]) -> None:
        self._service, self._body, self._job, self._head = service, body, job, head
        self._marks = ChatMarks(
            service.names, skip_special_tokens=body.skip_special_tokens, as_ids=body.return_tokens_as_token_ids
        )
        self._chunks = Chunks(head, body, job)

    async def whole(self) -> dict[str, object]:
        """The reply that is not a stream."""
        parts = [Part() for _ in self._job.choices]
        with self._job.admitted():
            async for choice, delta in self._job.deltas():
                part = parts[choice.index]
                part.text.append(delta.text)
                part.tokens += delta.tokens
                part.logprobs += delta.logprobs
                part.scores += delta.prompt_logprobs
                if delta.finish:
                    part.end = delta
        fields: dict[str, object] = {
            "choices": [self._choice(index, parts[choice.index]) for index, choice in enumerate(self._job.answers)],
            "usage": self._job.usage,
        }
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._job.choices[0].prompt.ids
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._service.names, parts[0].scores, self._body.prompt_logprobs
            )
        return self._head | fields

    def _choice(self, index: int, part: Part) -> dict[str, object]:
        fields: dict[str, object] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(part.text), "refusal": None},
            "logprobs": self._marks.of(part.logprobs) if self._body.logprobs else None,
            "finish_reason": part.end.finish,
            "stop_reason": part.end.stop_reason,
        }
        if self._body.return_token_ids:
            fields["token_ids"] = part.tokens
        return fields

    @property
    def opening(self) -> str:
        """The role of each choice: known before the engine begins."""
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        ids = self._job.choices[0].prompt.ids if self._body.return_token_ids else None
        first = f'"prompt_token_ids":{json.dumps(ids)},' if ids is not None else ""
        return "".join(self._chunks.event(f'{{"index":{choice.index},{role}}}', first) for choice in self._job.choices)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events after the opening. The one that ends a choice has an empty delta."""
        wants_marks, wants_ids = self._body.logprobs, self._body.return_token_ids
        async for choice, delta in self._job.deltas():
            events = ""
            if delta.text or (wants_marks and delta.logprobs) or (wants_ids and delta.tokens):
                events = self._content(choice, delta)
            if delta.finish:
                reasons = f'"finish_reason":"{delta.finish}","stop_reason":{json.dumps(delta.stop_reason)}'
                events += self._chunks.event(f'{{"index":{choice.index},"delta":{{}},"logprobs":null,{reasons}}}')
            if events:
                yield events.encode()
        yield self._chunks.last().encode() + DONE

    def _content(self, choice: Choice, delta: Delta) -> str:
        marks = json.dumps(self._marks.of(delta.logprobs)) if self._body.logprobs and delta.logprobs else "null"
        ids = f',"token_ids":{json.dumps(delta.tokens)}' if self._body.return_token_ids else ""
        return self._chunks.event(
            f'{{"index":{choice.index},"delta":{{"content":{quote(delta.text)}}},"logprobs":{marks},"finish_reason":null{ids}}}'
        )
