"""What the routes share: the engine, the text, who is served what. It knows no wire format.

What takes long (tokenizing, reading a large body, making many choices, writing many log-probabilities) is done on threads
of its own, so that the loop goes on answering; what is short is done at once, since handing it over would take longer.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

from turnout.server.api.defaults import defaults_of
from turnout.server.api.errors import ApiError, bad_request, show, unavailable
from turnout.server.api.logprobs import TokenNames
from turnout.server.api.metrics import Metrics
from turnout.server.api.schema import WireT, parse
from turnout.server.config import ServerConfig
from turnout.server.engine.bridge import EngineClient
from turnout.server.text.parsers import Parsers
from turnout.server.text.tokenizer import Text

SHORT = 2048  # characters that are tokenized on the loop; about two milliseconds
SURELY_LONG = 65536  # characters from which it pays to ask whether a text can fit at all
LOGPROBS_COST = 20  # characters whose tokenizing takes as long as writing a token's log-probabilities does
CHOICE_COST = 50  # likewise, and making a choice
PARSE_COST = 32  # bytes of JSON that are read while a character is tokenized
NUM_THREADS = 2
QUEUE_RETRY = 1  # seconds after which a client may try again when the queue is full

T = TypeVar("T")


class Service:
    """One per app. The engine is ready when it is made. Raises ValueError for a generation_config it cannot use."""

    def __init__(self, client: EngineClient, text: Text, config: ServerConfig, parsers: Parsers) -> None:
        self.client, self.text, self.config, self.parsers = client, text, config, parsers
        self.model = config.served_model_name or client.info.model  # its name in replies and metrics
        self.created = int(time.time())
        self.defaults = defaults_of(text, "server.generation_config", config.generation_config)
        self.names = TokenNames(text)
        self.metrics = Metrics(client, self.model, config.metrics_compat)
        self._num_computing = 0  # functions on threads
        self._pool = ThreadPoolExecutor(NUM_THREADS, "tokenize")

    def shown(self, *, calls: bool) -> frozenset[int]:
        """Special tokens that the parsers of an answer read; `calls`: those of tool calls too."""
        readers = (self.parsers.reasoning, self.parsers.tool if calls else None)
        added = self.text.added
        markers = (marker for reader in readers if reader is not None for marker in reader.markers)
        return frozenset(added[marker] for marker in markers if marker in added)

    def check_model(self, name: str | None) -> None:
        """A request may name the model as served, by an alias, as given to the server, by its path, or not at all."""
        info, aliases = self.client.info, self.config.model_aliases
        if name is not None and name not in (self.model, info.model, info.path, *aliases):
            raise ApiError(
                404,
                f"there is no model {show(name)}; this server serves {self.model!r}",
                param="model",
                code="model_not_found",
            )

    def check_able(self) -> None:
        """Raise ApiError 503 when the engine cannot answer, 429 when too many requests wait."""
        trouble = self.client.trouble()
        if trouble is not None:
            self.metrics.refused("unavailable")
            raise unavailable(trouble)
        num_waiting, most = self.num_waiting, self.config.max_queue
        if most is not None and num_waiting >= most:
            self.metrics.refused("queue_full")
            raise ApiError(
                429, f"{num_waiting} requests wait already: try again soon", code="queue_full", retry_after=QUEUE_RETRY
            )

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those included that the engine has not counted yet and has no seat for.

        What the engine says is a step old, so it may count some that have left since: there are never more than are open.
        """
        stats, num_open = self.client.stats, self.metrics.in_flight
        unseen = max(0, num_open - stats.num_running - stats.num_waiting)
        seats = 0 if stats.num_waiting else max(0, self.client.info.max_num_seqs - stats.num_running)
        return min(num_open, stats.num_waiting + max(0, unseen - seats))

    async def parse(self, kind: type[WireT], body: bytes) -> WireT:
        """The body as `kind`. Raises ApiError naming the field, the rule and the value."""
        return await self.compute(len(body) // PARSE_COST, lambda: parse(kind, body))

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The ids of each text. Raises ApiError for one that could never fit into the context."""
        await self.check_length(max(map(len, texts)), "prompt")

        def encode() -> list[list[int]]:
            return [self.text.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return await self.compute(sum(map(len, texts)), encode)

    async def compute(self, size: int, function: Callable[[], T]) -> T:
        """Call `function`, on a thread when it takes as long as tokenizing so many characters."""
        if size <= SHORT:
            return function()
        with self._uncollected():
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    @contextmanager
    def _uncollected(self) -> Iterator[None]:
        """No garbage collection meanwhile: it would look at millions of new objects again and again, with the loop waiting
        (measured: 11 s of a body with five million empty lists). What is made here has no cycles."""
        self._num_computing += 1
        gc.disable()
        try:
            yield
        finally:
            self._num_computing -= 1
            if not self._num_computing:
                gc.enable()

    async def check_length(self, num_chars: int, param: str) -> None:
        """Raise ApiError for so many characters that no tokenizer has to count them: they cannot fit."""
        if num_chars <= SURELY_LONG:
            return
        longest, limit = await self.compute(num_chars, lambda: self._longest_token), self.client.info.max_model_len
        if num_chars // longest > limit:
            raise bad_request(
                f"the context length is {limit} tokens, but the {param} has {num_chars} characters, at least "
                f"{num_chars // longest} tokens",
                param,
                "context_length_exceeded",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the vocabulary's longest token, at least."""
        return max(1, *(len(self.text.token_bytes(token)) for token in range(self.text.vocab_size)))
