"""What is measured is what happened: engines and servers whose time is made up, and numbers made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from scripted_http import DONE, Script, ScriptedServer, event, plain, usage, virtually
from virtual import timed_engine

from turnout.core.types import Request
from turnout.lab.bench.client import HttpLoad, LoadRequest
from turnout.lab.bench.config import BenchConfig
from turnout.lab.bench.engine import EngineLoad
from turnout.lab.bench.load import OfferedLoad
from turnout.lab.bench.measure import EngineSubject, measured
from turnout.lab.bench.prompts import PromptModel, Prompts
from turnout.lab.bench.sample import Sample
from turnout.lab.workload.agents import Agents
from turnout.lab.workload.arrivals import Arrival, prompt, sampling
from turnout.lab.workload.synthetic import Chat, Poisson
from turnout.plugins.scheduler import FCFS

LAW = (1.0, 0.1, 0.0, 0.0, 0.0, 0.0)  # a step takes a second, and a tenth for each prompt token
MODEL = PromptModel(900, 400)


class Times:
    """Requests at these times; each has 10 prompt tokens and says 3."""

    def __init__(self, *times: float) -> None:
        self._times = times

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        for number, time in enumerate(self._times):
            yield Arrival(Request(f"r{number}", prompt(number, 10), sampling(3), time))


def on_engine(workload: Any, clients: int | None = None, **limits: Any) -> tuple[list[Sample], float]:
    engine, clock = timed_engine(FCFS(), LAW, **limits)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    load = OfferedLoad(workload.arrivals(1.0, 2), clients)
    ran = EngineLoad(engine, load, Prompts(MODEL, 1), salt="run 1", clock=clock, sleep=sleep).run()
    assert ran.whole
    return ran.samples, ran.seconds


def test_an_engine_is_timed_from_when_each_request_was_planned() -> None:
    one, two = on_engine(Times(0.0, 2.5))[0]
    assert one.deliveries == [(2.0, 1), (3.0, 1), (5.0, 1)]  # the third step has the other's prompt in it
    assert (two.planned, two.sent) == (2.5, 3.0)  # it came in the middle of a step
    assert two.deliveries == [(5.0, 1), (6.0, 1), (7.0, 1)]
    assert (two.ttft, two.tpot, two.e2e, two.itl) == (2.5, 1.0, 4.5, [1.0, 1.0])
    assert (one.ttft, one.tpot, one.itl) == (2.0, 1.5, [1.0, 2.0])


def test_an_engine_that_falls_behind_is_asked_all_the_same() -> None:
    samples, seconds = on_engine(Times(*(0.1 * i for i in range(10))), max_num_seqs=1)
    assert [s.planned for s in samples] == pytest.approx([0.1 * i for i in range(10)])
    assert max(s.sent for s in samples) == 2.0  # all are sent when the first step ends, none waits for an answer
    assert samples[-1].ttft == pytest.approx(9 * 4.0 + 2.0 - 0.9)  # the whole queue is in it
    assert seconds == 40.0


def test_a_closed_loop_on_an_engine_keeps_its_clients() -> None:
    samples, _ = on_engine(Times(0.0, 50.0, 60.0), clients=1)
    assert [(s.planned, s.ended) for s in samples] == [(0.0, 4.0), (4.0, 8.0), (8.0, 12.0)]


def test_what_an_engine_refuses_has_failed() -> None:
    samples, _ = on_engine(Times(0.0), max_model_len=5)
    assert str(samples[0].error).startswith("refused: ")


def test_a_session_goes_on_from_what_the_engine_said_and_finds_it_in_the_cache() -> None:
    workload = Agents(num_requests=4, turns=50, prefix=20, prompt=10, output=4, tool=6, rate=1.0, pause=0.5)
    samples, _ = on_engine(workload, num_blocks=200)
    assert len(samples) >= 4
    last = samples[-1]
    assert last.num_cached > samples[-2].num_prompt - 4  # blocks of 4


def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing_in_the_engine() -> None:
    engine, clock = timed_engine(FCFS(), LAW)

    def interrupt(finished: int) -> None:
        if finished == 2:
            raise KeyboardInterrupt

    load = OfferedLoad(Times(*range(8)).arrivals(1.0, 1))
    ran = EngineLoad(engine, load, Prompts(MODEL, 1), clock=clock, sleep=lambda s: None, on_progress=interrupt).run()
    assert not ran.whole
    assert len(ran.samples) == 2
    assert not engine.busy
    assert engine.stats.num_blocks_free == engine.stats.num_blocks


def config(**changes: Any) -> BenchConfig:
    slots: dict[str, Any] = dict.fromkeys(
        (
            "loader",
            "attention",
            "scheduler",
            "preemption",
            "blocks",
            "quant",
            "runner",
            "tool_parser",
            "reasoning_parser",
        ),
        "",
    )
    return BenchConfig(**(slots | {"warmup": 2, "repetitions": 3, "max_seconds": None} | changes))


def test_a_point_is_warmed_up_repeated_and_summed_up() -> None:
    engine, clock = timed_engine(FCFS(), LAW)
    said: list[tuple[str, int]] = []
    workload = Poisson(num_requests=6, prompt=10, output=3)
    subject = EngineSubject(engine, 0.0, clock)
    found = measured(subject, config(workload=workload, concurrency=1), lambda stage, n: said.append((stage, n)))
    assert [stage for stage, _ in said if stage] == ["warming up", *(f"repetition {i} of 3" for i in (1, 2, 3))]
    assert [run["requests"]["finished"] for run in found["repetitions"]] == [6, 6, 6]
    assert engine.stats.finished["length"] == 2 + 18
    assert engine.stats.cached_tokens == 0  # no repetition finds what another one left
    assert found["median"]["ttft.p50"] == 2.0
    assert found["median"]["throughput.output_tokens"] == 18 / 24
    assert found["range"]["itl.p99"] == [1.0, 1.0]
    assert found["repetitions"][0]["engine"]["num_steps"] == 18
    assert found["load"]["kind"] == "closed loop, 1 clients"
    assert found["load"]["workload"] == {"name": "poisson", "options": vars_of(workload)}
    assert found["origin"]["fingerprint"] == "fp_fake"


def vars_of(workload: object) -> dict[str, Any]:
    return {name: value for name, value in vars(workload).items() if not name.startswith("_")}


def test_a_limit_of_time_is_said() -> None:
    engine, clock = timed_engine(FCFS(), LAW)
    workload = Chat(prompt=10, output=3)
    asked = config(workload=workload, concurrency=1, max_seconds=10.0, repetitions=1, warmup=0)
    found = measured(EngineSubject(engine, 0.0, clock), asked, lambda stage, n: None)
    assert found["repetitions"][0]["requests"]["sent"] < 10
    assert "max_seconds=10: what the workload has beyond it was not sent" in found["notes"]


def over_http(
    server: ScriptedServer, workload: Any, *, clients: int | None = None, **job: Any
) -> tuple[list[Sample], HttpLoad]:
    samples: list[Sample] = []
    load = HttpLoad(
        LoadRequest("http://127.0.0.1:1", workload, MODEL, "m", 1, 2, clients, **job), samples.append, server
    )
    virtually(load.run())
    return sorted(samples, key=lambda sample: sample.planned), load


def test_a_stream_is_timed_by_when_its_tokens_arrive() -> None:
    server = ScriptedServer(lambda number, body: plain([0.5, 0.25, 1.0]))
    one, two = over_http(server, Times(0.0, 10.0))[0]
    assert one.deliveries == [(0.5, 1), (0.75, 1), (1.75, 1)]
    assert (two.ttft, two.itl, two.tpot, two.e2e) == (0.5, [0.25, 1.0], 0.625, 1.75)
    assert two.num_said == 3
    body = server.asked[0][1]
    assert len(body["prompt"]) == 10
    assert {**body, "prompt": None} == {
        "model": "m",
        "prompt": None,
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_a_slow_server_is_asked_on_time_and_its_queue_is_in_the_latency() -> None:
    server = ScriptedServer(lambda number, body: plain([100.0, 1.0, 1.0]))
    samples, _ = over_http(server, Times(0.0, 1.0, 2.0))
    assert [when for when, _ in server.asked] == [0.0, 1.0, 2.0]
    assert [s.ttft for s in samples] == [100.0] * 3


def test_a_closed_loop_over_http_asks_when_it_was_answered() -> None:
    server = ScriptedServer(lambda number, body: plain([1.0, 0.5 * (number + 1)]))
    over_http(server, Times(0.0, 0.0, 0.0, 0.0), clients=2)
    assert [when for when, _ in server.asked] == [0.0, 0.0, 1.5, 2.0]


def test_what_arrives_together_is_one_delivery_and_cut_events_are_put_together() -> None:
    whole = event("ab") + event("c")
    steps = [(1.0, whole[:10]), (1.0, whole[10:]), (1.0, event("d")), (0.0, event("", finish="stop") + DONE)]
    (sample,), _ = over_http(ScriptedServer(lambda number, body: Script(200, steps)), Times(0.0))
    assert sample.deliveries == [(2.0, 2), (3.0, 1)]


def test_our_server_tells_token_ids_and_gets_a_salt_of_each_run() -> None:
    last = event("", ids=[], finish="length") + usage(3, cached=8) + DONE
    steps = [(1.0, event("", ids=[5])), (1.0, event("é", ids=[6, 7])), (0.0, last)]
    server = ScriptedServer(lambda number, body: Script(200, steps))
    (sample,), _ = over_http(server, Times(0.0), ours=True)
    assert sample.deliveries == [(1.0, 1), (2.0, 2)]  # a token without text counts when it comes
    assert sample.num_cached == 8
    assert server.asked[0][1]["cache_salt"] == "run 1 "


def test_tokens_that_were_only_counted_came_with_the_last_event() -> None:
    steps = [(1.0, event("word ")), (1.0, event("word")), (0.0, event("", finish="length") + usage(5) + DONE)]
    (sample,), _ = over_http(ScriptedServer(lambda number, body: Script(200, steps)), Times(0.0))
    assert sample.deliveries == [(1.0, 1), (2.0, 4)]


SLOW: list[tuple[float, bytes | Exception]] = [(1.0, event())]
FAULTS: dict[str, tuple[Callable[[], Script], str]] = {
    "an error of the server": (lambda: Script(500, [(0.0, b'{"error": "boom"}')]), "HTTP 500: "),
    "a refusal": (lambda: Script(429, [(0.0, b"too many")]), "HTTP 429: too many"),
    "nobody there": (lambda: Script(0, [], httpx.ConnectError("refused")), "no connection: refused"),
    "a connection that breaks": (
        lambda: Script(200, [*SLOW, (1.0, httpx.ReadError("reset"))]),
        "disconnected: ReadError",
    ),
    "an end too early": (lambda: Script(200, SLOW), "disconnected: the stream ended before the answer did"),
    "an error in the stream": (
        lambda: Script(200, [*SLOW, (0.0, b'data: {"error": {"message": "no memory"}}\n\n')]),
        "error in the stream: no memory",
    ),
    "nonsense": (lambda: Script(200, [*SLOW, (0.0, b"data: {nonsense\n\n")]), "not understood: {nonsense"),
    "silence": (lambda: Script(200, [*SLOW, (1.0, httpx.ReadTimeout(""))]), "timeout: no word for 600 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_fails_says_how_and_the_load_goes_on(fault: str) -> None:
    script, complaint = FAULTS[fault]
    server = ScriptedServer(lambda number, body: script() if number == 0 else plain([1.0]))
    first, second = over_http(server, Times(0.0, 10.0), clients=1)[0]
    assert str(first.error).startswith(complaint)
    assert second.error is None
    assert first.ended is not None


def test_a_session_over_http_goes_on_from_what_the_server_said() -> None:
    def script(number: int, body: dict[str, Any]) -> Script:
        said = [(0.1, event("", ids=[800 + number])) for _ in range(body["max_tokens"])]
        return Script(200, [*said, (0.0, event("", ids=[], finish="length") + DONE)])

    server = ScriptedServer(script)
    workload = Agents(num_requests=3, turns=50, prefix=20, prompt=10, output=4, tool=6, pause=0.5)
    over_http(server, workload, ours=True)
    (_, one), (_, two) = server.asked[:2]
    assert two["prompt"][: len(one["prompt"]) + one["max_tokens"]] == one["prompt"] + [800] * one["max_tokens"]
