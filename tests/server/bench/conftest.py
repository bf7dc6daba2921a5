"""Time that passes only when nobody has anything to do, a scripted server, a tiny model with a tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from models import save

T = TypeVar("T")
Step = tuple[float, bytes | Exception]  # seconds after the last one, what comes then


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeping takes no time: when nothing is ready, the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def jump(timeout: float | None = None) -> Any:
            if timeout is not None and timeout > 0:
                self._now += timeout
                timeout = 0.0
            return select(timeout)

        self._selector.select = jump

    def time(self) -> float:
        return self._now


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run it on a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def event(text: str = "x", *, ids: Sequence[int] | None = None, finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = list(ids)
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def usage(num_tokens: int, cached: int = 0) -> bytes:
    details = {"completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": details}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def plain(delays: Sequence[float], status: int = 200) -> Script:
    """A token after each delay, then the end."""
    last = [(0.0, event("", finish="length") + usage(len(delays)) + DONE)]
    return Script(status, [*((delay, event()) for delay in delays), *last])


class Script:
    """What a server does with one request."""

    def __init__(self, status: int, steps: Sequence[Step], refuses: Exception | None = None) -> None:
        self.status, self.steps, self.refuses = status, steps, refuses


class ScriptedServer(httpx.AsyncBaseTransport):
    """Answers each request as `script` says, on the event loop's clock. `asked`: (when, body) of each."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Script]) -> None:
        self._script = script
        self.asked: list[tuple[float, dict[str, Any]]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.asked.append((asyncio.get_running_loop().time(), body))
        script = self._script(len(self.asked) - 1, body)
        if script.refuses is not None:
            raise script.refuses
        return httpx.Response(script.status, stream=Stream(script.steps))


class Stream(httpx.AsyncByteStream):
    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay, what in self._steps:
            await asyncio.sleep(delay)
            if isinstance(what, Exception):
                raise what
            yield what


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: number + 3 for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = save("llama", tmp_path_factory.mktemp("tiny"), vocab_size=len(vocabulary), max_position_embeddings=512)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
