"""The load on a server over HTTP, and the process that makes it. It knows OpenAI's completions, streamed, and no engine.

Each request is a task; the next one never waits for the last. What arrives together is one delivery, timed once.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from turnout.lab.bench.load import First, OfferedLoad, PlannedRequest
from turnout.lab.bench.prompts import PromptModel, Prompts
from turnout.lab.bench.remote import is_local
from turnout.lab.bench.reply import MOST, Reply
from turnout.lab.bench.sample import Sample
from turnout.lab.simulate.fairness import LABEL
from turnout.lab.workload.arrivals import Workload

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class LoadRequest:
    """One run of a load, as it is sent to the process that makes it."""

    url: str
    workload: Workload | First
    model: PromptModel
    model_name: str
    run: int
    seats: int
    clients: int | None = None
    limit: float = math.inf  # seconds
    temperature: float = 0.0
    timeout: float = 600.0  # seconds of silence
    api_key: str | None = None
    ours: bool = False  # it tells token ids and takes salts
    ignore_eos: bool = True  # ask for answers of full length, where the server understands that

    def load(self) -> OfferedLoad:
        return OfferedLoad(self.workload.arrivals(1.0, self.seats), self.clients, self.limit)


class HttpLoad:
    """One run. Time is the event loop's, so that tests decide what time it is."""

    def __init__(
        self, job: LoadRequest, done: Callable[[Sample], None], transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`done` hears of each request when it has ended, well or not."""
        self._job, self._done, self._transport = job, done, transport
        self._load, self._prompts = job.load(), Prompts(job.model, job.run)
        self._said: dict[str, list[int]] = {}
        self.fingerprint = ""

    @property
    def cut(self) -> bool:
        """There was more to send when the limit was over."""
        return self._load.cut

    @property
    def num_cut(self) -> int:
        """Prompts that were too long."""
        return self._prompts.num_cut

    async def run(self) -> float:
        """To the last answer. Returns when the last request was due. Raises ValueError for recorded prompts that are not
        this model's."""
        import httpx

        loop, load = asyncio.get_running_loop(), self._load
        headers = {"authorization": f"Bearer {self._job.api_key}"} if self._job.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        tasks: set[asyncio.Task[None]] = set()
        proxies = not is_local(self._job.url)
        async with httpx.AsyncClient(
            headers=headers, timeout=self._job.timeout, limits=limits, transport=self._transport, trust_env=proxies
        ) as self._client:
            self._began = loop.time()
            while True:
                tasks |= {asyncio.create_task(self._ask(planned)) for planned in load.due(loop.time() - self._began)}
                if not tasks and load.next_at == math.inf:
                    return load.last_planned
                wait = load.next_at - (loop.time() - self._began)
                if tasks:
                    ended, tasks = await asyncio.wait(
                        tasks, timeout=None if wait == math.inf else max(wait, 0.0), return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in ended:
                        task.result()
                else:
                    await asyncio.sleep(max(wait, 0.0))

    async def _ask(self, planned: PlannedRequest) -> None:
        loop, asked, job = asyncio.get_running_loop(), planned.request, self._job
        said = self._said.pop(planned.before.id, []) if planned.before is not None else []
        tokens = self._prompts.of(planned, said)
        num = asked.sampling.max_tokens
        sample = Sample(asked.id, planned.at, loop.time() - self._began, len(tokens), num, asked.labels.get(LABEL, ""))
        reply = Reply()
        body: dict[str, Any] = {
            "model": job.model_name,
            "prompt": tokens,
            "max_tokens": num,
            "temperature": job.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if job.ignore_eos:
            body["ignore_eos"] = True
        if job.ours:
            salt = f"run {job.run} {asked.salt or ''}"
            body |= {"return_token_ids": True, "cache_salt": salt, "priority": asked.priority}
        sample.error = await self._stream(body, sample, reply)
        sample.ended = loop.time() - self._began
        sample.num_cached, self.fingerprint = reply.num_cached, reply.fingerprint or self.fingerprint
        if self._load.answered(sample.id, sample.ended):
            self._said[sample.id] = reply.tokens
        else:
            self._prompts.forget(sample.id)
        self._done(sample)

    async def _stream(self, body: dict[str, Any], sample: Sample, reply: Reply) -> str | None:
        """Why it failed."""
        import httpx

        loop = asyncio.get_running_loop()
        try:
            async with self._client.stream("POST", f"{self._job.url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread())[:MOST].decode(errors="replace")
                    return f"HTTP {response.status_code}: {text}"
                async for piece in response.aiter_bytes():
                    count = reply.feed(piece)
                    if count:
                        sample.deliveries.append((loop.time() - self._began, count))
        except httpx.TimeoutException:
            return f"timeout: no word for {self._job.timeout:g} s (remote.timeout)"
        except httpx.ConnectError as error:
            return f"no connection: {error}"
        except httpx.HTTPError as error:
            return f"disconnected: {type(error).__name__} {error}"
        unseen = reply.close()
        if unseen and sample.deliveries:
            time, count = sample.deliveries[-1]
            sample.deliveries[-1] = (time, count + unseen)
        return reply.error


def main() -> None:
    """The generator's process. Standard input: sys.path, then Jobs; standard output: for each a Sample a request, then a dict.

    It ends when standard input does: whoever started it is gone then.
    """
    sys.path[:] = pickle.load(sys.stdin.buffer)
    jobs: SimpleQueue[LoadRequest] = SimpleQueue()
    out = sys.stdout.buffer

    def send(message: object) -> None:
        pickle.dump(message, out, pickle.HIGHEST_PROTOCOL)
        out.flush()

    def listen() -> None:
        with suppress(EOFError):
            while True:
                jobs.put(pickle.load(sys.stdin.buffer))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        load = HttpLoad(jobs.get(), send)
        try:
            last_planned = asyncio.run(load.run())
        except ValueError as error:
            send({"wrong": str(error)})
            continue
        send({"last_planned": last_planned, "fingerprint": load.fingerprint, "cut": load.cut, "num_cut": load.num_cut})
