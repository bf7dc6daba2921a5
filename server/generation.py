"""One HTTP request's generation: its choices, each a request to the engine, and their text as it comes.

Choices are numbered prompt by prompt: with two prompts and n=2, choices 0 and 1 continue the first prompt.

The token that ends a choice, an end token or one of stop_token_ids, counts as generated and has its log-probability,
but is no part of the text. A stop string ends a choice as soon as the text holds it: tokens up to there count, the engine
is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import NamedTuple, cast

from turnout.core.types import Finish, Logprobs, Output, Request, Sampling
from turnout.server.bridge import EngineError
from turnout.server.errors import ApiError, bad_request, unavailable
from turnout.server.metrics import Flight
from turnout.server.sampling import child, end_ids
from turnout.server.schema import Generation
from turnout.server.service import Service
from turnout.server.text import Detokenizer, Text

TAIL = 16  # last tokens of a prompt, enough to tell how the text goes on

log = logging.getLogger("turnout.server")


class Prompt(NamedTuple):
    """A prompt as ids and, for echo, as the text the client sent."""

    ids: list[int]
    text: str = ""
    continues: bool = True  # the answer goes on in the prompt's text; False: it begins a text of its own


class Delta(NamedTuple):
    """What one output of the engine adds to a choice."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish: str | None = None  # stop or length
    stop_reason: str | int | None = None  # the stop string or the id of stop_token_ids that ended it


class Choice:
    """One answer on its way."""

    def __init__(self, index: int, prompt: Prompt, request: Request, body: Generation, text: Text) -> None:
        self.index, self.prompt, self.request = index, prompt, request
        self.num_tokens = self.num_cached = 0
        self._end_ids, self._shows_end = end_ids(body, text), body.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            text,
            prompt_tail=prompt.ids[-TAIL:] if prompt.continues else (),
            skip_special_tokens=body.skip_special_tokens,
            stop=body.stop,
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
        )

    def push(self, output: Output) -> Delta:
        """Raises ApiError when the engine gave the request up."""
        if output.finish is Finish.ERROR:
            raise ApiError(500, f"the engine failed on this request: {output.error}", code="engine_error")
        if output.finish is Finish.ABORT:
            raise unavailable("the engine ended this request")
        self.num_cached = output.num_cached
        tokens, logprobs = output.tokens, output.logprobs
        shown, finish = tokens, output.finish.value if output.finish else None
        stop_reason: str | int | None = None
        if output.finish is Finish.STOP:
            stop_reason = None if tokens[-1] in self._end_ids else tokens[-1]
            shown = tokens if self._shows_end else tokens[:-1]
        detokenizer, before = self._detokenizer, self.num_tokens
        self.num_tokens += len(tokens)
        text = detokenizer.push(shown) if shown else ""
        if finish and detokenizer.stopped is None:
            text += detokenizer.finish()
        if detokenizer.stopped is not None:
            finish, stop_reason = "stop", detokenizer.stopped
            self.num_tokens = detokenizer.num_tokens_used
            tokens = tokens[: self.num_tokens - before]
            logprobs = logprobs[: self.num_tokens - before]
        return Delta(text, tokens, logprobs, output.prompt_logprobs, finish, stop_reason)


class Job:
    """All choices of one HTTP request. Enter it before reading deltas: that is where the queue may be full."""

    def __init__(
        self, service: Service, body: Generation, prompts: Sequence[Prompt], samplings: Sequence[Sampling], since: float
    ) -> None:
        self._service, self._body, self._since = service, body, since
        self._num_prompt = sum(len(prompt.ids) for prompt in prompts)
        name, pairs = uuid.uuid4().hex, list(zip(prompts, samplings, strict=True))
        labels = {k: v for k, v in (("user", body.user), ("service_tier", body.service_tier)) if v is not None}
        self.choices = [
            Choice(
                index := number * body.n + place,
                prompt,
                Request(
                    f"{name}-{index}",
                    list(prompt.ids),
                    child(sampling, place),
                    priority=body.priority,
                    labels=labels,
                    salt=body.cache_salt,
                ),
                body,
                service.text,
            )
            for number, (prompt, sampling) in enumerate(pairs)
            for place in range(body.n)
        ]

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Raises ApiError when the engine cannot take it now. Whatever happens inside, each choice is counted once."""
        self._service.check_able()
        requests = [choice.request for choice in self.choices]
        self._flights = self._service.metrics.begin(requests, self._body.n, self._since)
        try:
            yield
        finally:
            for flight in self._flights:
                flight.ended("abort")

    @property
    def usage(self) -> dict[str, object]:
        """A prompt counts once, however many choices it has."""
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.num_cached for choice in self.choices[:: self._body.n])
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": completion,
            "total_tokens": self._num_prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def deltas(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """What comes, in the order it comes, until all choices have ended. Closing it early aborts the rest.

        Raises ApiError; the other choices are aborted then.
        """
        if len(self.choices) == 1:
            return self._follow(self.choices[0], self._flights[0])
        return self._merged()

    async def _merged(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        arrived: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue()

        async def pump(choice: Choice, flight: Flight) -> None:
            try:
                async with aclosing(self._follow(choice, flight)) as deltas:
                    async for item in deltas:
                        arrived.put_nowait(item)
            except Exception as error:  # noqa: BLE001  raised where it is read
                arrived.put_nowait(error)

        tasks = [asyncio.create_task(pump(*pair)) for pair in zip(self.choices, self._flights, strict=True)]
        num_open = len(tasks)
        try:
            while num_open:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item[1].finish is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, choice: Choice, flight: Flight) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """One choice from its first delta to the one with `finish`."""
        outputs = cast(AsyncGenerator[Output, None], self._service.client.generate(choice.request))
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if output.tokens:
                        flight.tokens_came()
                    delta = choice.push(output)
                    if delta.finish:
                        flight.ended(delta.finish, choice.num_tokens, choice.num_cached, output.timing)
                    yield choice, delta
                    if delta.finish:
                        return
        except Exception as error:
            failure = failure_of(error)
            flight.ended("refused" if failure.status == 400 else "error")
            raise failure from error
        flight.ended("error")
        raise ApiError(500, "the engine ended this request without saying why", code="engine_error")


def failure_of(error: Exception) -> ApiError:
    """Any exception behind a route as what the client is told. What nobody foresaw is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return (
            unavailable(str(error)) if error.status == 503 else ApiError(error.status, str(error), code="engine_error")
        )
    if isinstance(error, ValueError):  # the engine would not take the request
        return bad_request(str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")
