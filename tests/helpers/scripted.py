"""A scripted engine behind the engine client's protocol."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from turnout.core.types import EngineInfo, Finish, Logprobs, Output, Request, Stats, Timing
from turnout.server.engine.messages import Asked, BeamSearch, ParallelSampling
from turnout.server.engine.parallel import requests_of
from turnout.server.text.tokenizer import Text

STORY = (
    " blue and wide, and the harbour town lies between two hills where the river meets it. Every morning the fishermen"
    " push their small wooden boats into the grey water and row past the lighthouse with baskets of silver fish."
)


class ScriptedEngine:
    """Greedy requests tell STORY; sampled ones tell its tokens in an order their seed decides."""

    def __init__(self, text: Text, **info: Any) -> None:
        self.story = text.encode(STORY, add_special_tokens=False)
        self.info = replace(
            EngineInfo(
                model="models/smol",
                path="elsewhere/smol",
                architecture="LlamaForCausalLM",
                dtype="float32",
                device="cpu",
                vocab_size=49152,
                max_model_len=2048,
                num_blocks=400,
                block_size=16,
                capacity=6400,
                max_num_seqs=4,
                max_num_batched_tokens=512,
                fingerprint="fp_scripted",
                composition={"attention": {"name": "torch"}, "server": {"api_key": "hush"}},
                plugins={"attention": {"name": "torch", "package": "turnout", "version": "0.1"}},
                versions={"turnout": "0.1.0"},
            ),
            **info,
        )
        self.stats = Stats(num_blocks=400, num_blocks_free=400)
        self.requests: list[Request] = []
        self.asked: list[Asked] = []  # the same, beam searches as such
        self.left: list[str] = []  # ids of requests whose reader left early
        self.pace = 0.0  # seconds a token takes
        self.before_first = 0.0  # seconds the first output takes
        self.per_output = 1  # tokens in one output
        self.num_cached = 0
        self.broken: str | None = None
        self.fails_with: Exception | str | None = None  # an exception raised, or the error of a failed request
        self.fails_after = 0  # tokens made before that
        self.logprob: Callable[[int], float] = lambda token: -1.0
        self.lowest = -9.0  # the least likely alternative's log-probability
        self.script: Callable[[Request], list[int]] = self._tell

    def trouble(self) -> str | None:
        return self.broken

    def _tell(self, request: Request) -> list[int]:
        sampling = request.sampling
        forced = [token for token, bias in sampling.logit_bias.items() if bias == 100]
        story = list(self.story)
        if sampling.temperature:
            random.Random(sampling.seed).shuffle(story)
        allowed = [token for token in story if sampling.logit_bias.get(token) != -100]
        made = [forced[0] if forced else allowed[i % len(allowed)] for i in range(sampling.max_tokens)]
        banned = [i for i, token in enumerate(made[: sampling.min_tokens]) if token in sampling.stop_ids]
        for i in banned:
            made[i] = allowed[i % len(allowed)]
        return made

    async def generate(self, asked: Asked) -> AsyncIterator[Output]:
        self.asked.append(asked)
        if not isinstance(asked, ParallelSampling):
            async for output in self._answer(asked):
                yield output
            return
        arrived: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._tasks = {r.id: asyncio.create_task(self._pump(r, arrived)) for r in requests_of(asked)}
        tasks, num_open = self._tasks, len(self._tasks)
        try:
            while num_open:
                output = await arrived.get()
                if isinstance(output, Exception):
                    raise output
                num_open -= output.finish is not None
                yield output
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _pump(self, request: Request, arrived: asyncio.Queue[Output | Exception]) -> None:
        try:
            async for output in self._answer(request):
                arrived.put_nowait(output)
        except asyncio.CancelledError:
            arrived.put_nowait(Output(request.id, finish=Finish.ABORT))
            raise
        except Exception as error:  # noqa: BLE001
            arrived.put_nowait(error)

    def abort(self, request_id: str) -> None:
        self._tasks[request_id].cancel()

    async def _answer(self, asked: Request | BeamSearch) -> AsyncIterator[Output]:
        request, outputs = (asked.request, self._beams) if isinstance(asked, BeamSearch) else (asked, self._outputs)
        self.requests.append(request)
        arrived, done = time.monotonic(), False
        await self._seat(request)
        try:
            async for output in outputs(asked, arrived):
                done = output.finish is not None
                yield output
        finally:
            self.stats.num_running -= 1
            if not done:
                self.left.append(request.id)

    async def _seat(self, request: Request) -> None:
        """Wait until one of `max_num_seqs` seats is free."""
        self.stats.num_waiting += 1
        try:
            while self.stats.num_running >= self.info.max_num_seqs:
                await asyncio.sleep(0.001)
            self.stats.num_running += 1
        except asyncio.CancelledError:
            self.left.append(request.id)
            raise
        finally:
            self.stats.num_waiting -= 1

    async def _outputs(self, request: Request, arrived: float) -> AsyncIterator[Output]:
        await asyncio.sleep(self.before_first)
        sampling = request.sampling
        scheduled, first = time.monotonic(), None
        scores = tuple(
            self._mark(t, sampling.prompt_logprobs) for t in request.tokens[1:] if sampling.prompt_logprobs is not None
        )
        if sampling.max_tokens == 0:
            timing = Timing(arrived, scheduled, None, time.monotonic())
            yield Output(request.id, (), Finish.LENGTH, (), scores, None, self.num_cached, timing)
            return
        half = len(scores) // 2
        if half:  # a long prompt is scored in pieces
            yield Output(request.id, prompt_logprobs=scores[:half], num_cached=self.num_cached)
        made, scores = self.script(request), scores[half:]
        for start in range(0, len(made), self.per_output):
            if self.fails_with is not None and start >= self.fails_after:
                if isinstance(self.fails_with, Exception):
                    raise self.fails_with
                yield Output(request.id, finish=Finish.ERROR, error=self.fails_with)
                return
            await asyncio.sleep(self.pace)
            first = first or time.monotonic()
            tokens = made[start : start + self.per_output]
            stops = [i for i, token in enumerate(tokens) if token in sampling.stop_ids]
            if stops:
                tokens = tokens[: stops[0] + 1]
            finish = Finish.STOP if stops else Finish.LENGTH if start + len(tokens) >= len(made) else None
            marks = tuple(self._mark(t, sampling.logprobs) for t in tokens if sampling.logprobs is not None)
            timing = Timing(arrived, scheduled, first, time.monotonic()) if finish else None
            yield Output(request.id, tuple(tokens), finish, marks, scores, None, self.num_cached, timing)
            scores = ()
            if finish:
                return

    async def _beams(self, asked: BeamSearch, arrived: float) -> AsyncIterator[Output]:
        """Answer k tells STORY from its token k on, up to the first stop id; all come at the end."""
        await asyncio.sleep(self.before_first)
        sampling = asked.request.sampling
        if sampling.prompt_logprobs is not None:
            scores = tuple(self._mark(token, sampling.prompt_logprobs) for token in asked.request.tokens[1:])
            yield Output(asked.id, prompt_logprobs=scores, num_cached=self.num_cached)
        if isinstance(self.fails_with, Exception):
            raise self.fails_with
        await asyncio.sleep(self.pace)
        for place, name in enumerate(asked.answers):
            if self.fails_with is not None:
                yield Output(name, finish=Finish.ERROR, error=self.fails_with)
                continue
            tokens = self.story[place : place + sampling.max_tokens]
            stops = [i for i, token in enumerate(tokens) if token in sampling.stop_ids]
            tokens = tokens[: stops[0] + 1] if stops else tokens
            marks = tuple(self._mark(token, sampling.logprobs) for token in tokens if sampling.logprobs is not None)
            now = time.monotonic()
            finish, timing = Finish.STOP if stops else Finish.LENGTH, Timing(arrived, arrived, now, now)
            yield Output(name, tuple(tokens), finish, marks, (), None, self.num_cached, timing)

    def _mark(self, token: int, num_top: int | None) -> Logprobs:
        """The token itself is always the second likeliest, after token 1000."""
        logprob = self.logprob(token)
        others = [(1000, -0.5), (token, logprob), *((2000 + i, -2.0 - i) for i in range(17)), (5, self.lowest)]
        return Logprobs(token, logprob, 2, tuple(others[: num_top or 0]))
