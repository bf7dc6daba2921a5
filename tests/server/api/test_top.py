"""`turnout top`: a running server in a terminal, known only by its routes."""

from __future__ import annotations

import dataclasses

import httpx
import pytest
from callers import live
from observed import Observed
from scripted import ScriptedEngine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from turnout.lab import top
from turnout.lab.top import MetricsSample, TopOptions, rows, scrape
from turnout.server.api.app import create_app
from turnout.server.cli.main import main
from turnout.server.cli.overrides import Usage
from turnout.server.config import ServerConfig
from turnout.server.text.tokenizer import Text

PLUGINS = {"model_name": "m", "engine": "0", "plugin_version": "", "scheduler": "fcfs", "attention": "cpu"}


def sample(at: float, modes: dict[str, float] | None = None, **series: float) -> MetricsSample:
    named = {name.replace("__", ":", 1): value for name, value in series.items()}
    return MetricsSample(at, named, modes or {}, PLUGINS, "m")


def shown(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert top.run(["every=0.05", "once=true", *args]) == 0
    return capsys.readouterr().out


def test_one_frame_shows_queue_blocks_tokens_and_plugins(
    url: str, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.stats.num_waiting, engine.stats.num_blocks_free = 3, 100
    engine.stats.prompt_tokens, engine.stats.cached_tokens = 200, 50
    text = shown([f"url={url}"], capsys)
    assert f"Turnout · models/smol at {url}" in text
    lines = {line[:12].strip(): line[12:].strip() for line in text.splitlines()}
    assert lines["queue"] == "3 waiting" and lines["running"] == "0"
    assert lines["blocks"].endswith(" 75% in use")
    assert lines["prefix cache"].endswith("25% of 200 prompt tokens found")
    assert "attention_backend=torch" in lines["plugins"]
    assert "single steps: start the server with server.debug=true" in text


def test_single_steps_are_shown_where_the_server_tells_them(text: Text, capsys: pytest.CaptureFixture[str]) -> None:
    client = Observed()
    with live(create_app(client, text, ServerConfig(debug=True))) as url:
        httpx.post(f"{url}/v1/completions", json={"model": "fake", "prompt": [5, 6, 7], "max_tokens": 2})
        lines = shown([f"url={url}"], capsys).splitlines()
    head = next(place for place, line in enumerate(lines) if line.split()[:3] == ["step", "prompt", "decode"])
    assert [line.split()[:4] for line in lines[head + 1 : head + 3]] == [["1", "3", "0", "0"], ["2", "0", "1", "0"]]


def test_rates_are_what_happened_between_two_looks() -> None:
    before = sample(10.0, vllm__prompt_tokens_total=100, vllm__generation_tokens_total=7, turnout__step_seconds_count=1)
    after = sample(
        12.0,
        {"recompute": 2, "swap": 0},
        vllm__prompt_tokens_total=300,
        vllm__prompt_tokens_cached_total=60,
        vllm__generation_tokens_total=27,
        turnout__recomputed_tokens_total=10,
        turnout__step_seconds_count=6,
        turnout__step_seconds_sum=0.5,
        turnout__scheduler_decision_seconds_sum=0.01,
    )
    found = dict(rows(before, after))
    assert found["tokens/s"] == "75 prompt, 10 generated"
    assert found["a step"] == "30.0 prompt + 4.0 decode tokens"
    assert found["steps"] == "2.5 a second, 100.0 ms each, 2.00 ms to schedule"
    assert found["preemptions"] == "2 by recompute, 0 by swap; 10 tokens computed again"
    assert found["plugins"] == "attention=cpu scheduler=fcfs"


def test_a_server_at_rest_has_no_steps() -> None:
    now = sample(1.0)
    found = dict(rows(now, dataclasses.replace(now, at=2.0)))
    assert (found["steps"], found["a step"], found["prefix cache"]) == ("none", "nothing was computed", "not asked yet")


def test_no_server_is_said_in_a_line_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--once", "url=http://127.0.0.1:1"])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("turnout: no server answers at http://127.0.0.1:1: ") and "turnout serve" in error


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (PlainTextResponse("", 404), "has no /metrics"),
        (PlainTextResponse("# TYPE up gauge\nup 1\n"), "its metrics are not Turnout's"),
        (JSONResponse({"error": {"message": "loading"}}, 503), "503 Service Unavailable: loading"),
    ],
)
def test_what_answers_but_is_no_running_turnout_is_said(reply: PlainTextResponse, words: str) -> None:
    async def metrics(request: Request) -> PlainTextResponse:
        return reply

    with live(Starlette(routes=[Route("/metrics", metrics)])) as url, pytest.raises(top.NoServer, match=words):  # type: ignore[arg-type]
        scrape(TopOptions(url))


def test_a_server_without_the_metrics_it_reads_is_told_how_to_have_them(engine: ScriptedEngine, text: Text) -> None:
    app = create_app(engine, text, ServerConfig(metrics_compat=[]))
    with live(app) as url, pytest.raises(top.NoServer, match=r"server\.metrics_compat=\[v1\]"):
        scrape(TopOptions(url))


@pytest.mark.parametrize("args", [["now"], ["color=red"], ["every=soon"], ["every=0"], ["url=127.0.0.1:8000"]])
def test_arguments_that_mean_nothing_are_refused(args: list[str]) -> None:
    with pytest.raises(Usage):
        top.parsed(args)
