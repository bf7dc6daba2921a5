"""Whatever one client sends, the loop goes on: what takes long is done on threads, what is many is handed over in bursts."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from callers import Api
from scripted import ScriptedEngine

from turnout.core.types import Request, Sampling
from turnout.server.api import chat, completions, generation, service
from turnout.server.api.generation import Job
from turnout.server.api.schema import CompletionRequest, parse
from turnout.server.api.service import Service
from turnout.server.config import ServerConfig
from turnout.server.text import stop
from turnout.server.text.output import Prompt
from turnout.server.text.parsers import Parsers
from turnout.server.text.stop import StopStrings
from turnout.server.text.tokenizer import Text

Watch = Callable[..., list[bool]]


@pytest.fixture
def on_loop(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watch a function: for each call, whether the thread it ran on has an event loop."""

    def watch(owner: Any, name: str) -> list[bool]:
        calls: list[bool] = []
        plain = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(asyncio._get_running_loop() is not None)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)
        return calls

    return watch


LONG = [5] * 1000
MANY = {"prompt": [LONG] * 3, "n": 128, "max_tokens": 1}


@pytest.mark.parametrize(("size", "expected"), [(100, True), (200_000, False)])
def test_a_large_body_is_read_on_a_thread(api: Api, on_loop: Watch, size: int, expected: bool) -> None:
    calls = on_loop(service, "parse")
    api.complete("Hello", max_tokens=1, unknown="x" * size)
    assert calls == [expected]


def test_a_long_text_is_tokenized_on_a_thread_and_lets_others_run_meanwhile(text: Text, on_loop: Watch) -> None:
    engine, turns = ScriptedEngine(text, max_model_len=10**6), 0
    calls = on_loop(text, "encode")

    async def run() -> None:
        nonlocal turns
        one = Service(engine, text, ServerConfig(), Parsers())
        work = asyncio.create_task(one.encode(["hello wörld " * 4000], add_special_tokens=True))
        while not work.done():
            await asyncio.sleep(0)
            turns += 1

    asyncio.run(run())
    assert calls == [False] and turns > 10, "the tokenizer keeps the interpreter to itself"


def test_ids_are_checked_and_choices_made_on_a_thread(api: Api, on_loop: Watch) -> None:
    checks, jobs = on_loop(completions, "check_ids"), on_loop(completions, "Job")
    assert len(api.complete(**MANY).good["choices"]) == 3 * 128
    assert checks == [False] * 3 and jobs == [False]


@pytest.mark.parametrize(
    ("module", "fields"),
    [
        (completions, {"prompt": LONG, "prompt_logprobs": 20, "max_tokens": 1}),
        (chat, {"messages": [{"role": "user", "content": "word " * 600}], "prompt_logprobs": 20, "max_tokens": 1}),
    ],
)
def test_large_answers_are_written_on_a_thread(api: Api, on_loop: Watch, module: Any, fields: dict[str, Any]) -> None:
    calls = on_loop(module, "to_json")
    path = "/v1/completions" if module is completions else "/v1/chat/completions"
    assert api.post(path, fields).status == 200
    assert calls == [False]


def test_a_large_echo_of_a_stream_is_written_on_a_thread(api: Api, on_loop: Watch) -> None:
    calls = on_loop(completions.CompletionReply, "_event")
    api.complete(LONG, echo=True, logprobs=5, max_tokens=2, stream=True).choices(0)
    assert calls[0] is False and calls[1:] == [True] * len(calls[1:])


def test_messages_to_the_engine_are_pickled_by_the_thread_that_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from turnout.server.engine import process

    threads: list[str] = []
    done = threading.Event()

    class Child(process.ChildProcess):
        def __init__(self) -> None:
            from multiprocessing import Pipe
            from queue import SimpleQueue

            self._outbox = SimpleQueue()
            self._reader, writer = Pipe(duplex=False)
            threading.Thread(target=self._write, args=(writer,), name="to-engine", daemon=True).start()

    class Message:
        def __reduce__(self) -> Any:
            threads.append(threading.current_thread().name)
            done.set()
            return str, ("message",)

    child = Child()
    child.send(Message())
    assert done.wait(10) and threads == ["to-engine"]
    child.send(None)


def test_many_prompts_are_sent_and_many_outputs_read_in_bursts(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    plain = generation._let_others

    async def counted(count: int) -> None:
        turns.append(count)
        await plain(count)

    monkeypatch.setattr(generation, "_let_others", counted)
    api.complete([[5, 6]] * 70, n=2, max_tokens=1)
    assert len(turns) == 70 + 2 * 70, "once for each prompt sent and each output read"


def test_no_garbage_is_collected_while_a_thread_computes(text: Text) -> None:
    async def run() -> list[bool]:
        one = Service(ScriptedEngine(text), text, ServerConfig(), Parsers())
        first, second = await asyncio.gather(*(one.compute(10**6, gc.isenabled) for _ in range(2)))
        with pytest.raises(KeyError):
            await one.compute(10**6, lambda: {}["gone"])
        return [first, second, gc.isenabled()]

    assert asyncio.run(run()) == [False, False, True]


STOP = "".join(chr(97 + i % 26) for i in range(2048))


def test_long_stop_strings_are_set_up_once_however_many_choices_watch_for_them(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StopStrings] = []
    monkeypatch.setattr(stop.StopStrings, "__init__", _counting(made, stop.StopStrings.__init__))
    one = Service(ScriptedEngine(text), text, ServerConfig(), Parsers())
    body = {"prompt": ["a"] * 32, "n": 128, "stop": [STOP], "max_tokens": 1}
    request = parse(CompletionRequest, json.dumps(body).encode())
    tracemalloc.start()
    job = Job(one, request, [Prompt([5])] * 32, [Sampling(max_tokens=1)] * 32, 0.0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(job.choices) == 4096 and len(made) == 1
    assert size < 4096 * 5000, f"{size / 4096:.0f} bytes a choice"


def _counting(made: list[StopStrings], plain: Any) -> Any:
    def init(self: StopStrings, stops: Any = ()) -> None:
        made.append(self)
        plain(self, stops)

    return init


@pytest.mark.parametrize(
    ("stops", "texts"),
    [
        ([STOP], [STOP[:-1]] * 40),  # a long beginning held back, again and again
        (["a" * 2000 + "b"], ["a"] * 4000),
        (["a" + "b" * 30] * 32 + ["a" * 900 + "x"], ["a"] * 2000),
    ],
)
def test_a_text_that_almost_stops_costs_a_bounded_number_of_comparisons(stops: list[str], texts: list[str]) -> None:
    class Counted(str):
        compared = 0

        def startswith(self, *args: Any) -> bool:
            Counted.compared += 1
            return super().startswith(*args)

    watch = StopStrings([Counted(one) for one in stops])
    held = ""
    for piece in texts:
        whole = held + piece
        assert watch.completed(whole, len(held)) is None
        held = whole[len(whole) - watch.num_open(whole) :]
    num_chars = sum(map(len, texts))
    assert Counted.compared <= 64 * num_chars


def test_children_are_told_apart_from_the_request_that_scores(text: Text) -> None:
    """One message for all choices of a prompt."""
    one = Service(ScriptedEngine(text), text, ServerConfig(), Parsers())
    request = parse(CompletionRequest, json.dumps({"prompt": LONG, "n": 128}).encode())
    job = Job(one, request, [Prompt(LONG)], [Sampling(max_tokens=1)], 0.0)
    (order,) = job._orders
    assert not isinstance(order.asked, Request) and len(order.asked.answers) == 128
