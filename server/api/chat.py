"""POST /v1/chat/completions: messages go through the model's chat template, the answer comes whole or as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from turnout.server.api.choice import Choice
from turnout.server.api.conversation import check_template_kwargs, check_tools, normalize
from turnout.server.api.errors import bad_request
from turnout.server.api.generation import Job
from turnout.server.api.logprobs import ChatLogprobs, prompt_logprobs
from turnout.server.api.sampling import max_tokens_of, sampling_of
from turnout.server.api.schema import ChatRequest, Templated, read_body
from turnout.server.api.service import LOGPROBS_COST, Service
from turnout.server.api.streams import DONE, EventStream, unless_gone
from turnout.server.api.wire import Chunks, head_of, quote
from turnout.server.text.output import Collected, Delta, Prompt


def chat_routes(service: Service) -> APIRouter:
    """The route, for this service."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        since = time.monotonic()
        raw = await read_body(request)
        body = await service.parse(ChatRequest, raw)
        body.request_id = body.request_id or request.state.request_id
        service.check_model(body.model)
        service.check_able()
        job = await _job(service, body, len(raw), since)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        reply = ChatReply(service, body, job, head_of(service, body, "chatcmpl", kind))
        if body.stream:
            return EventStream(job.admitted(), reply.events(), reply.opening.encode())
        return Response(await unless_gone(request, reply.whole()), media_type="application/json")

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


class ChatReply:
    """One request's reply."""

    def __init__(self, service: Service, body: ChatRequest, job: Job, head: dict[str, object]) -> None:
        self._service, self._body, self._job, self._head = service, body, job, head
        self._logprobs = ChatLogprobs(
            service.names, skip_special_tokens=body.skip_special_tokens, as_ids=body.return_tokens_as_token_ids
        )
        self._chunks = Chunks(head, body, job)

    async def whole(self) -> bytes:
        """The reply that is not a stream."""
        collected = await self._job.collected()
        size = sum(len(one.logprobs) + len(one.prompt_logprobs) for one in collected)
        return await self._service.compute(size * LOGPROBS_COST, lambda: to_json(self._fields(collected)))

    def _fields(self, collected: Sequence[Collected]) -> dict[str, object]:
        body = self._body
        fields: dict[str, object] = {
            "choices": [self._choice(index, collected[choice.index]) for index, choice in enumerate(self._job.answers)],
            "usage": self._job.usage,
        }
        if body.return_token_ids:
            fields["prompt_token_ids"] = self._job.choices[0].prompt.ids
        if body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._service.names, collected[0].prompt_logprobs, body.prompt_logprobs
            )
        return self._head | fields

    def _choice(self, index: int, answer: Collected) -> dict[str, object]:
        fields: dict[str, object] = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs.of(answer.logprobs) if self._body.logprobs else None,
            "finish_reason": answer.finish,
            "stop_reason": answer.stop_reason,
        }
        if self._body.return_token_ids:
            fields["token_ids"] = answer.tokens
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
        wants_logprobs, wants_ids = self._body.logprobs, self._body.return_token_ids
        async for choice, delta in self._job.deltas():
            events = ""
            if delta.text or (wants_logprobs and delta.logprobs) or (wants_ids and delta.tokens):
                events = self._content(choice, delta)
            if delta.finish:
                reasons = f'"finish_reason":"{delta.finish}","stop_reason":{json.dumps(delta.stop_reason)}'
                events += self._chunks.event(f'{{"index":{choice.index},"delta":{{}},"logprobs":null,{reasons}}}')
            if events:
                yield events.encode()
        yield self._chunks.last().encode() + DONE

    def _content(self, choice: Choice, delta: Delta) -> str:
        logprobs = json.dumps(self._logprobs.of(delta.logprobs)) if self._body.logprobs and delta.logprobs else "null"
        ids = f',"token_ids":{json.dumps(delta.tokens)}' if self._body.return_token_ids else ""
        return self._chunks.event(
            f'{{"index":{choice.index},"delta":{{"content":{quote(delta.text)}}},"logprobs":{logprobs},"finish_reason":null{ids}}}'
        )
