"""Clients that leave end their requests; a queue that is full refuses; neither touches anyone else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable

import httpx
import pytest
from callers import BOTH, Api, until
from scripted import ScriptedEngine

from turnout.server.text.tokenizer import Text


@pytest.mark.parametrize(
    ("path", "n", "stream", "waiting"),
    [(BOTH[0], 1, True, False), (BOTH[0], 3, False, True), (BOTH[1], 3, True, True), (BOTH[1], 1, False, False)],
)
def test_a_client_that_leaves_ends_its_requests_at_once(
    engine: ScriptedEngine, url: str, path: str, n: int, stream: bool, waiting: bool
) -> None:
    engine.pace, engine.before_first = 0.005, 30 if waiting else 0
    body = {"prompt": "a"} if path == BOTH[0] else {"messages": [{"role": "user", "content": "a"}]}
    body |= {"max_tokens": 1500, "n": n, "stream": stream}

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            asking = asyncio.create_task(client.post(path, json=body))
            while len(engine.requests) < n:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert not engine.left
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(ask_and_leave())
    until(lambda: len(engine.left) == n, 2)
    assert engine.stats.num_running == 0
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}


def test_one_client_that_leaves_does_not_touch_the_others(engine: ScriptedEngine, text: Text, url: str) -> None:
    engine.pace = 0.005
    body = {"prompt": "a", "max_tokens": 60, "stream": True, "temperature": 0}
    answers: list[str] = []

    def read(leave: bool) -> None:
        with httpx.stream("POST", f"{url}{BOTH[0]}", json=body, timeout=20) as reply:
            said = ""
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    said += json.loads(line[6:])["choices"][0]["text"]
                if leave and len(said) > 20:
                    return
        answers.append(said)

    threads = [threading.Thread(target=read, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    story = engine.story * 2
    assert answers == [text.decode(story[:60])] * 3
    until(lambda: len(engine.left) == 3, 2)


def test_a_full_queue_refuses_what_it_cannot_hold_and_serves_the_rest(
    engine: ScriptedEngine, api_with: Callable[..., Api]
) -> None:
    engine.pace = 0.05
    api = api_with(max_queue=3)  # and 4 seats in the scripted engine
    calls = [("POST", BOTH[0], {"json": {"prompt": "a", "max_tokens": 5, "stream": i % 2 == 0}}) for i in range(20)]
    replies = api.together(calls)
    full = [reply for reply in replies if reply.status == 429]
    assert sorted({reply.status for reply in replies}) == [200, 429] and len(full) == 13
    for reply in full:
        assert 0 < int(reply.headers["retry-after"]) <= 120
        assert (reply.error["code"], reply.error["type"]) == ("queue_full", "rate_limit_error")
    assert api.complete().status == 200


def test_requests_that_left_since_the_engines_last_word_do_not_fill_the_queue(
    engine: ScriptedEngine, api_with: Callable[..., Api]
) -> None:
    api = api_with(max_queue=3)
    engine.stats.num_waiting = 9  # of a long step ago; no request is open
    assert api.complete().status == 200


def test_requests_that_wait_for_blocks_fill_the_queue_though_seats_are_free(
    engine: ScriptedEngine, api_with: Callable[..., Api]
) -> None:
    engine.pace = 0.01
    api = api_with(max_queue=3)
    engine.stats.num_waiting = 2  # what the scripted engine holds itself comes on top
    replies = api.together([("POST", BOTH[0], {"json": {"prompt": "a", "max_tokens": 5}}) for _ in range(6)])
    engine.stats.num_waiting = 0
    assert 429 in {reply.status for reply in replies}
    assert api.complete().status == 200


def test_without_a_bound_the_queue_is_never_full(engine: ScriptedEngine, api: Api) -> None:
    calls = [("POST", BOTH[0], {"json": {"prompt": "a", "max_tokens": 2}}) for _ in range(40)]
    assert {reply.status for reply in api.together(calls)} == {200}
