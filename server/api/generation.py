"""One HTTP request's generation: what the engine is asked, and its choices as they come.

Choices are numbered prompt by prompt: with two prompts and n=2, choices 0 and 1 continue the first prompt. A prompt with
its choices is one question to the engine: a request, a parallel sampling whose answers share the prompt's blocks, or a
beam search, whose answers come at the end, best first. With best_of so many choices are made for a prompt, of which n are
returned.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import cast

from turnout.core.types import Output, Request, Sampling
from turnout.server.api.choice import Choice, text_options
from turnout.server.api.errors import ApiError, bad_request, unavailable
from turnout.server.api.metrics import InFlight
from turnout.server.api.schema import Generation
from turnout.server.api.service import Service
from turnout.server.api.structured import field_of
from turnout.server.engine.bridge import EngineError
from turnout.server.engine.messages import Asked, BeamSearch, ParallelSampling
from turnout.server.text.output import Collected, Delta, OutputText, Prompt

BURST = 32  # outputs that are handled, or prompts that are sent, before others have their turn

log = logging.getLogger("turnout.server")


class Order:
    """One prompt: what the engine is asked, the choices that are its answers, and what is counted of them."""

    def __init__(self, asked: Asked, choices: Sequence[Choice]) -> None:
        self.asked, self.choices = asked, choices
        self.request = asked if isinstance(asked, Request) else asked.request
        self.counted = choices[:1] if isinstance(asked, BeamSearch) else choices  # a search is one request
        self.in_flight: dict[str, InFlight] = {}  # by choice id, once it was admitted

    def count(self, choice: Choice, output: Output) -> None:
        """Count what `output` brought, which `choice` has taken."""
        counted = self.in_flight.get(choice.id)
        if counted is not None and output.tokens:
            counted.tokens_came()
        if isinstance(self.asked, BeamSearch):
            first = self.choices[0]
            if first.finish and all(one.finish for one in self.choices):
                num_tokens = sum(one.num_tokens for one in self.choices)
                self.in_flight[first.id].ended(first.finish, num_tokens, first.num_cached, output.timing)
        elif choice.finish:
            self.in_flight[choice.id].ended(choice.finish, choice.num_tokens, choice.num_cached, output.timing)

    def ended(self, outcome: str) -> None:
        """Count what has not ended before."""
        for counted in self.in_flight.values():
            counted.ended(outcome)


class Job:
    """All choices of one HTTP request. Enter it before reading deltas: that is where the queue may be full."""

    def __init__(
        self,
        service: Service,
        body: Generation,
        prompts: Sequence[Prompt],
        samplings: Sequence[Sampling],
        since: float,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown`: special tokens that the text keeps, for a parser."""
        self.count_reasoning: Callable[[], int] | None = None  # tokens so far, where a parser knows
        self._service, self._body, self._since = service, body, since
        self._num_prompt = sum(len(prompt.ids) for prompt in prompts)
        self._size = body.n if body.use_beam_search else body.num_made  # choices of a prompt
        self._name, self._options = uuid.uuid4().hex, text_options(body, service.text, shown)
        self._orders = [
            self._order(number * self._size, *pair) for number, pair in enumerate(zip(prompts, samplings, strict=True))
        ]
        self.choices = [choice for order in self._orders for choice in order.choices]

    def _order(self, first: int, prompt: Prompt, sampling: Sampling) -> Order:
        """What is asked of one prompt, its choices numbered from `first`."""
        body = self._body
        if self._size > body.n and sampling.logprobs is None:  # they tell which answers are best
            sampling = replace(sampling, logprobs=0)
        form, text = field_of(body), self._service.text
        choices = [
            Choice(index, first, f"{self._name}-{index}", prompt, OutputText(text, prompt, self._options), form)
            for index in range(first, first + self._size)
        ]
        names = tuple(choice.id for choice in choices)
        request = Request(
            names[0],
            list(prompt.ids),
            sampling,
            priority=body.priority,
            labels=self._labels(),
            salt=body.cache_salt,
        )
        if body.use_beam_search:
            return Order(BeamSearch(request, names, body.num_made, body.length_penalty, body.early_stopping), choices)
        return Order(ParallelSampling(request, names) if len(names) > 1 else request, choices)

    def _labels(self) -> dict[str, str]:
        """What schedulers and logs read of the request. Raises ApiError for a priority that is not the client's to choose."""
        body, trusted = self._body, self._service.config.client_scheduling
        if body.priority and not trusted:
            raise bad_request(
                "this server does not let clients choose their priority: leave it out, or start the server with "
                "server.client_scheduling=true",
                "priority",
            )
        own = {"user": body.user, "service_tier": body.service_tier, "request": body.request_id}
        return (body.metadata if trusted else {}) | {name: value for name, value in own.items() if value is not None}

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Raises ApiError when the engine cannot take it now. Whatever happens inside, each choice is counted once."""
        metrics = self._service.metrics
        self._service.check_able()
        metrics.admitted(self._body.n)
        for order in self._orders:
            counted = metrics.begin(order.request, len(order.counted), self._since)
            order.in_flight = {choice.id: one for choice, one in zip(order.counted, counted, strict=True)}
        try:
            yield
        finally:
            for order in self._orders:
                order.ended("abort")

    @property
    def usage(self) -> dict[str, object]:
        """A prompt counts once, however many choices it has; every choice counts, also one that is not returned."""
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(order.choices[0].num_cached for order in self._orders)
        usage: dict[str, object] = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": completion,
            "total_tokens": self._num_prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.count_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.count_reasoning()}
        return usage

    @property
    def answers(self) -> list[Choice]:
        """The choices to return: all, or of each prompt's the `n` whose tokens have the best mean log-probability."""
        n = self._body.n
        if n == self._size:
            return self.choices
        best = [sorted(order.choices, key=lambda choice: -choice.mean_logprob)[:n] for order in self._orders]
        return [choice for choices in best for choice in choices]

    async def collected(self, seen: Callable[[Choice, Delta], None] | None = None) -> list[Collected]:
        """All that comes, by choice, each delta shown to `seen`. Admits the job, and raises as `admitted` and `deltas` do."""
        collected = [Collected() for _ in self.choices]
        with self.admitted():
            async for choice, delta in self.deltas():
                collected[choice.index].add(delta)
                if seen is not None:
                    seen(choice, delta)
        return collected

    def deltas(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """What comes, in the order it comes, until all choices have ended. Closing it early aborts the rest.

        Raises ApiError; the other choices are aborted then.
        """
        if len(self._orders) == 1:
            return self._follow(self._orders[0])
        return self._merged()

    async def _merged(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        arrived: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue()

        async def pump(order: Order) -> None:
            try:
                async with aclosing(self._follow(order)) as deltas:
                    async for pair in deltas:
                        arrived.put_nowait(pair)
            except Exception as error:  # noqa: BLE001  raised where it is read
                arrived.put_nowait(error)

        tasks: list[asyncio.Task[None]] = []
        num_open = len(self.choices)
        try:
            for order in self._orders:
                tasks.append(asyncio.create_task(pump(order)))
                await _let_others(len(tasks))
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

    async def _follow(self, order: Order) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """An order from the first delta to the last one with `finish`."""
        client, num_open, num_outputs = self._service.client, len(order.choices), 0
        outputs = cast(AsyncGenerator[Output, None], client.generate(order.asked))
        by_id = {choice.id: choice for choice in order.choices}
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    num_outputs += 1
                    await _let_others(num_outputs)
                    choice = by_id[output.request_id]
                    if choice.finish:
                        continue  # a stop string has ended it
                    delta = choice.push(output)
                    order.count(choice, output)
                    if delta.finish:
                        num_open -= 1
                        if not output.finish and num_open:
                            client.abort(choice.id)
                    yield choice, delta
                    if not num_open:
                        return
        except Exception as error:
            failure = failure_of(error)
            order.ended("refused" if failure.status == 400 else "error")
            raise failure from error
        order.ended("error")
        raise ApiError(500, "the engine ended this request without saying why", code="engine_error")


async def _let_others(count: int) -> None:
    """Hand the loop over now and then: what has arrived already is read without it."""
    if count % BURST == 0:
        await asyncio.sleep(0)


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
