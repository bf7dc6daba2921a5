"""POST /v1/chat/completions: messages go through the model's chat template, the answer comes whole or as a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from turnout.core.parsers import BrokenCall, CallDelta, Thought
from turnout.server.api.choice import Choice
from turnout.server.api.conversation import check_template_kwargs, check_tools, normalize
from turnout.server.api.errors import bad_request
from turnout.server.api.generation import Job
from turnout.server.api.logprobs import ChatLogprobs, prompt_logprobs
from turnout.server.api.sampling import max_tokens_of, sampling_of
from turnout.server.api.schema import ChatRequest, Templated, read_body
from turnout.server.api.service import LOGPROBS_COST, Service
from turnout.server.api.streams import DONE, EventStream, unless_gone
from turnout.server.api.tools import tool_use, with_form
from turnout.server.api.wire import Chunks, head_of, quote
from turnout.server.text.output import Collected, Delta, Prompt
from turnout.server.text.parsers import CollectedParts, Part, Parts, reading

REASONING = ("reasoning", "reasoning_content")  # the fields of its text: both names are read by clients


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
        reply = await _reply(service, body, len(raw), since)
        if body.stream:
            return EventStream(reply.job.admitted(), reply.events(), reply.opening.encode())
        return Response(await unless_gone(request, reply.whole()), media_type="application/json")

    return router


async def chat_prompt(service: Service, body: Templated, size: int, **options: object) -> Prompt:
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

    def template() -> Prompt:
        text = service.text.render(
            messages,
            tools=body.tools or None,
            add_generation_prompt=begins,
            continue_final_message=body.continue_final_message,
            template_kwargs=options | body.chat_template_kwargs,
        )
        ids = service.text.encode(text, add_special_tokens=False)
        return Prompt(ids, text, continues=body.continue_final_message)

    await service.check_length(sum(len(str(message["content"])) for message in messages), "messages")
    try:
        return await service.compute(size, template)
    except ValueError as error:
        raise bad_request(f"the model's chat template refused the messages: {error}", "messages") from None


async def _reply(service: Service, body: ChatRequest, size: int, since: float) -> ChatReply:
    use = tool_use(body)
    prompt, info = await chat_prompt(service, body, size, **_template_options(body)), service.client.info
    if not prompt.ids:
        raise bad_request("the chat template makes an empty prompt of these messages: send some content", "messages")
    sampling = sampling_of(
        body,
        service.defaults,
        service.text,
        info,
        max_tokens=max_tokens_of(body.limit, None, len(prompt.ids), info),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        whitespace=service.config.whitespace,
    )
    prefill = str(body.messages[-1].get("content") or "") if body.continue_final_message else ""

    def parts() -> Parts:
        return Parts(*reading(service.parsers, use.read, prompt.text, prefill), most=use.most)

    sampling = with_form(service, body, use, sampling, reasons=parts().reasons)
    job = Job(service, body, [prompt], [sampling], since, shown=service.shown(calls=use.read is not None))
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    made = [parts() for _ in job.choices] if service.parsers.reasoning or use.read is not None else []
    return ChatReply(service, body, job, head_of(service, body, "chatcmpl", kind), made)


def _template_options(body: ChatRequest) -> dict[str, object]:
    """What the request says of reasoning, in the words templates have for it."""
    if body.reasoning_effort is None:
        return {}
    off = {"enable_thinking": False, "thinking": False} if body.reasoning_effort == "none" else {}
    return {"reasoning_effort": body.reasoning_effort, **off}


class ChatReply:
    """One request's reply. `parts`: of each choice, what its parsers make of it; none: its text is its content."""

    def __init__(
        self, service: Service, body: ChatRequest, job: Job, head: dict[str, object], parts: Sequence[Parts]
    ) -> None:
        self._service, self._body, self.job, self._head, self._parts = service, body, job, head, parts
        self._collected = [CollectedParts() for _ in parts]
        if service.parsers.reasoning is not None:
            job.count_reasoning = lambda: sum(one.num_reasoning for one in parts)
        self._logprobs = ChatLogprobs(
            service.names, skip_special_tokens=body.skip_special_tokens, as_ids=body.return_tokens_as_token_ids
        )
        self._chunks = Chunks(head, body, job)

    async def whole(self) -> bytes:
        """The reply that is not a stream."""
        collected = await self.job.collected(self._collect if self._parts else None)
        size = sum(len(one.logprobs) + len(one.prompt_logprobs) for one in collected)
        return await self._service.compute(size * LOGPROBS_COST, lambda: to_json(self._fields(collected)))

    def _collect(self, choice: Choice, delta: Delta) -> None:
        self._collected[choice.index].add(self._read(choice, delta))

    def _read(self, choice: Choice, delta: Delta) -> list[Part]:
        """What the parsers make of a delta."""
        parts = self._parts[choice.index]
        found = parts.push(delta.text, delta.tokens, delta.finish)
        if delta.finish:
            self._service.metrics.called(parts.num_calls, parts.num_broken)
        return found

    def _reason(self, choice: Choice, finish: str | None) -> str | None:
        """Why the choice ended, in the API's words."""
        calls = finish == "stop" and self._parts and self._parts[choice.index].called
        return "tool_calls" if calls else finish

    def _fields(self, collected: Sequence[Collected]) -> dict[str, object]:
        body = self._body
        fields: dict[str, object] = {
            "choices": [
                self._choice(index, choice, collected[choice.index]) for index, choice in enumerate(self.job.answers)
            ],
            "usage": self.job.usage,
        }
        if body.return_token_ids:
            fields["prompt_token_ids"] = self.job.choices[0].prompt.ids
        if body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._service.names, collected[0].prompt_logprobs, body.prompt_logprobs
            )
        return self._head | fields

    def _choice(self, index: int, choice: Choice, answer: Collected) -> dict[str, object]:
        fields: dict[str, object] = {
            "index": index,
            "message": self._message(choice, answer),
            "logprobs": self._logprobs.of(answer.logprobs) if self._body.logprobs else None,
            "finish_reason": self._reason(choice, answer.finish),
            "stop_reason": answer.stop_reason,
        }
        if self._body.return_token_ids:
            fields["token_ids"] = answer.tokens
        return fields

    def _message(self, choice: Choice, answer: Collected) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": answer.text, "refusal": None}
        if not self._parts:
            return message
        parts = self._collected[choice.index]
        message["content"] = parts.content
        if self._body.include_reasoning and self._service.parsers.reasoning is not None:
            message |= dict.fromkeys(REASONING, parts.reasoning or None)
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [
                _opened(first) | {"function": {"name": first.name, "arguments": arguments}}
                for first, arguments in parts.calls
            ]
        return message

    @property
    def opening(self) -> str:
        """The role of each choice: known before the engine begins."""
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        ids = self.job.choices[0].prompt.ids if self._body.return_token_ids else None
        first = f'"prompt_token_ids":{json.dumps(ids)},' if ids is not None else ""
        return "".join(self._chunks.event(f'{{"index":{choice.index},{role}}}', first) for choice in self.job.choices)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events after the opening. The one that ends a choice has an empty delta."""
        async for choice, delta in self.job.deltas():
            events = self._pieces(choice, delta)
            if delta.finish:
                reason = self._reason(choice, delta.finish)
                reasons = f'"finish_reason":"{reason}","stop_reason":{json.dumps(delta.stop_reason)}'
                events += self._chunks.event(f'{{"index":{choice.index},"delta":{{}},"logprobs":null,{reasons}}}')
            if events:
                yield events.encode()
        yield self._chunks.last().encode() + DONE

    def _pieces(self, choice: Choice, delta: Delta) -> str:
        """The events of a delta's parts; the first has what belongs to its tokens."""
        if self._parts:
            pieces = [self._piece(part) for part in self._read(choice, delta)]
            pieces = [piece for piece in pieces if piece]
        else:
            pieces = [f'"content":{quote(delta.text)}'] if delta.text else []
        rest = '"logprobs":null,"finish_reason":null'
        logprobs = json.dumps(self._logprobs.of(delta.logprobs)) if self._body.logprobs and delta.logprobs else "null"
        first = f'"logprobs":{logprobs},"finish_reason":null'
        if self._body.return_token_ids and delta.tokens:
            first += f',"token_ids":{json.dumps(delta.tokens)}'
        if not pieces and first != rest:
            pieces = ['"content":""']
        return "".join(
            self._chunks.event(f'{{"index":{choice.index},"delta":{{{piece}}},{rest if place else first}}}')
            for place, piece in enumerate(pieces)
        )

    def _piece(self, part: Part) -> str:
        """A part as a delta's fields; empty: it is not shown."""
        if isinstance(part, Thought):
            wanted = REASONING if self._body.include_reasoning else ()
            return ",".join(f'"{name}":{quote(part.text)}' for name in wanted)
        if isinstance(part, CallDelta):
            call: dict[str, object] = {"index": part.index}
            if part.name is not None:
                call |= _opened(part) | {"function": {"name": part.name, "arguments": ""}}
            else:
                call["function"] = {"arguments": part.arguments}
            return f'"tool_calls":[{json.dumps(call)}]'
        return f'"content":{quote(part.text if isinstance(part, BrokenCall) else part)}'


def _opened(first: CallDelta) -> dict[str, object]:
    """What a call's first delta says beside the function."""
    return {"id": first.id or f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
