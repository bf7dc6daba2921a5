"""One HTTP request's generation: what the engine is asked, and its choices as they come.

Choices are numbered prompt by prompt: with two prompts and n=2, choices 0 and 1 continue the first prompt. Each is a
request to the engine, children of their prompt's first one: that computes and scores the prompt, and all share its
blocks. With best_of so many choices are made for a prompt, of which n are returned. In a beam search one question to the
engine has all choices of a prompt for its answers, which come at the end, best first.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import NamedTuple, cast

from turnout.core.types import Output, Sampling
from turnout.server.api.answers import several
from turnout.server.api.choice import Choice, Delta, Prompt
from turnout.server.api.errors import ApiError, bad_request, unavailable
from turnout.server.api.metrics import Flight
from turnout.server.api.schema import Generation
from turnout.server.api.service import Service
from turnout.server.engine.bridge import EngineError
from turnout.server.engine.messages import Ask, BeamSearch

log = logging.getLogger("turnout.server")


class Order(NamedTuple):
    """What the engine is asked, and the choices that are its answers."""

    asked: Ask
    choices: Sequence[Choice]


class Job:
    """All choices of one HTTP request. Enter it before reading deltas: that is where the queue may be full."""

    def __init__(
        self, service: Service, body: Generation, prompts: Sequence[Prompt], samplings: Sequence[Sampling], since: float
    ) -> None:
        self._service, self._body, self._since = service, body, since
        self._num_prompt = sum(len(prompt.ids) for prompt in prompts)
        self._size = body.n if body.use_beam_search else body.num_made  # choices of a prompt
        name = uuid.uuid4().hex
        self._groups = [  # by prompt
            self._made(name, number * self._size, *pair)
            for number, pair in enumerate(zip(prompts, samplings, strict=True))
        ]
        self.choices = [choice for group in self._groups for choice in group]
        if body.use_beam_search:
            self._orders = [Order(self._search(group), group) for group in self._groups]
        else:
            self._orders = [Order(choice.request, (choice,)) for choice in self.choices]

    def _made(self, name: str, first: int, prompt: Prompt, sampling: Sampling) -> list[Choice]:
        """The choices of one prompt, numbered from `first`."""
        body = self._body
        own = {"user": body.user, "service_tier": body.service_tier, "request": body.request_id}
        labels = body.metadata | {name: value for name, value in own.items() if value is not None}
        requests = several(
            name,
            prompt.ids,
            sampling,
            self._size,
            first=first,
            ranked=self._size > body.n,
            priority=body.priority,
            labels=labels,
            salt=body.cache_salt,
        )
        text = self._service.text
        return [Choice(index, first, prompt, request, body, text) for index, request in enumerate(requests, first)]

    def _search(self, choices: Sequence[Choice]) -> BeamSearch:
        body, names = self._body, tuple(choice.request.id for choice in choices)
        return BeamSearch(choices[0].request, names, body.num_made, body.length_penalty, body.early_stopping)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Raises ApiError when the engine cannot take it now. Whatever happens inside, each order is counted once."""
        self._service.check_able()
        requests = [order.choices[0].request for order in self._orders]
        self._flights = self._service.metrics.begin(requests, self._body.n, self._since)
        try:
            yield
        finally:
            for flight in self._flights:
                flight.ended("abort")

    @property
    def usage(self) -> dict[str, object]:
        """A prompt counts once, however many choices it has; every choice counts, also one that is not returned."""
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(group[0].num_cached for group in self._groups)
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": completion,
            "total_tokens": self._num_prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def answers(self) -> list[Choice]:
        """The choices to return: all, or of each prompt's the `n` whose tokens have the best mean log-probability."""
        n = self._body.n
        if n == self._size:
            return self.choices
        return [c for group in self._groups for c in sorted(group, key=lambda choice: -choice.mean_logprob)[:n]]

    def deltas(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """What comes, in the order it comes, until all choices have ended. Closing it early aborts the rest.

        Raises ApiError; the other choices are aborted then.
        """
        if len(self._orders) == 1:
            return self._follow(self._orders[0], self._flights[0])
        return self._merged()

    async def _merged(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        arrived: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue()
        begun = {choice.leader: asyncio.Event() for choice in self.choices}

        async def pump(order: Order, flight: Flight) -> None:
            try:
                async with aclosing(self._follow(order, flight)) as deltas:
                    async for choice, delta in deltas:
                        if choice.index != choice.leader:  # an echo begins with what the leader has scored
                            await begun[choice.leader].wait()
                        arrived.put_nowait((choice, delta))
                        if delta.tokens or delta.finish:
                            begun[choice.leader].set()
            except Exception as error:  # noqa: BLE001  raised where it is read
                arrived.put_nowait(error)

        tasks = [asyncio.create_task(pump(*pair)) for pair in zip(self._orders, self._flights, strict=True)]
        num_open = len(self.choices)
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

    async def _follow(self, order: Order, flight: Flight) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """An order from the first delta to the last one with `finish`."""
        outputs = cast(AsyncGenerator[Output, None], self._service.client.generate(order.asked))
        first, num_open = order.choices[0], len(order.choices)
        by_id = {choice.request.id: choice for choice in order.choices}
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    choice = by_id[output.request_id]
                    if output.tokens and choice is first:
                        flight.tokens_came()
                    delta = choice.push(output)
                    num_open -= delta.finish is not None
                    if not num_open and first.finish:
                        num_tokens = sum(choice.num_tokens for choice in order.choices)
                        flight.ended(first.finish, num_tokens, first.num_cached, output.timing)
                    yield choice, delta
                    if not num_open:
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
