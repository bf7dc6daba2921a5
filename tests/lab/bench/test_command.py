"""`turnout bench` as it is typed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
from grids import every

from turnout.compose import plugins
from turnout.lab.bench import command
from turnout.lab.bench.config import BenchConfig, Equality, Remote
from turnout.lab.simulate.points import expand
from turnout.server.cli import main

GUIDE = Path(__file__).parents[3] / "docs/bench.md"
LOAD = ("workload=poisson", "workload.num_requests=6", "workload.prompt=12", "workload.output=4", "concurrency=2")
FAST = (*LOAD, "warmup=1", "repetitions=2", "blocks.num_blocks=60", "attention=torch", "remote.calibrate=false")
HTTP = (*LOAD, "warmup=1", "repetitions=2", "remote.calibrate=false")

Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command on the tiny model; its exit code, what it printed and what it complained."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["turnout"])
        model = () if any(arg.startswith(("url=", "model=")) for arg in args) else (f"model={tiny}",)
        with pytest.raises(SystemExit) as end:
            main.main(["bench", *model, *args])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


def test_a_sweep_ends_in_one_table_with_the_front_and_whether_answers_are_the_same(
    bench: Bench, tmp_path: Path
) -> None:
    out, text = tmp_path / "out.json", tmp_path / "out.md"
    same = ("ab=true", "equality.num_prompts=6", "equality.max_tokens=4")
    code, said, complaint = bench(
        "--multirun",
        "blocks.block_size=8,16",
        "scheduler=fcfs,chunked_prefill",
        *FAST,
        *same,
        f"out={out}",
        f"markdown={text}",
    )
    assert code == 0, complaint
    found = json.loads(out.read_text())
    points = found["points"]
    assert [point["point"] for point in points] == [
        {"blocks.block_size": size, "scheduler": name} for size in ("8", "16") for name in ("fcfs", "chunked_prefill")
    ]
    assert len({point["origin"]["fingerprint"] for point in points}) == 4
    assert {run["requests"]["finished"] for point in points for run in point["repetitions"]} == {6}
    assert [point["equality"]["against"] for point in points] == [None, *["blocks.block_size=8 scheduler=fcfs"] * 3]
    assert {point["equality"]["verdict"] for point in points[1:]} <= {"equivalent", "not enough data"}
    assert max(point["equality"]["kl_mean"] for point in points[1:]) < 1e-6
    assert any(point["pareto"]["front"] for point in points)
    assert points[0]["origin"]["composition"]["blocks"]["options"]["block_size"] == 8
    for name in ("processor", "threads", "load_average", "versions", "git"):
        assert name in found["environment"]
    for title in ("TTFT p50", "TTFT p99", "ITL p99", "output tokens/s", "goodput, share", "★", "answers"):
        assert title in said
        assert title in text.read_text()
    assert "the baseline" in said
    assert "latencies count from the planned time; 2 repetitions, 1 requests to warm up" in said
    assert f"{out} has all numbers" in said


@pytest.mark.slow
def test_many_points_stand_below_each_other(bench: Bench) -> None:
    code, said, _ = bench("concurrency=range(1,8)", *(arg for arg in FAST if arg != "concurrency=2"), "repetitions=1")
    assert code == 0
    assert len([line for line in said.splitlines() if "concurrency=" in line]) == 7


@pytest.mark.slow
def test_our_own_server_is_started_measured_and_stopped(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    code, said, complaint = bench("serve=true", *FAST, "repetitions=1", f"out={out}")
    assert code == 0, complaint
    point = json.loads(out.read_text())["points"][0]
    assert point["repetitions"][0]["requests"] == {
        "sent": 6, "finished": 6, "failed": 0, "short": 0, "errors": {}
    }  # fmt: skip
    assert point["repetitions"][0]["tokens"]["output"] == 24
    assert point["origin"]["fingerprint"].startswith("fp_")
    assert point["origin"]["composition"]["blocks"]["options"]["num_blocks"] == 60
    assert "its own limits were not measured (remote.calibrate=false)" in said
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
def test_the_generators_own_limits_are_measured() -> None:
    from turnout.lab.bench.generator import Generator, limits

    with Generator() as generator:
        found = limits(generator, 4)
    assert found["clients"] == 4
    assert found["events"] > found["requests"] > 1
    assert 0 < found["added_p50"] <= found["added_p99"]


@pytest.mark.slow
def test_anybodys_server_can_be_measured_once_its_vocabulary_is_known(
    bench: Bench, stranger: Any, tmp_path: Path
) -> None:
    code, _, said = bench(f"url={stranger.url}", *HTTP)
    assert code == 2
    assert "does not say its model's vocab_size, and prompts are made of token ids: give remote.vocab_size" in said
    out = tmp_path / "out.json"
    code, said, complaint = bench(f"url={stranger.url}", "remote.vocab_size=5000", *HTTP, f"out={out}")
    assert code == 0, complaint
    point = json.loads(out.read_text())["points"][0]
    assert [run["requests"]["finished"] for run in point["repetitions"]] == [6, 6]
    assert {body["model"] for body in stranger.asked} == {"theirs"}
    assert len(stranger.asked) == 1 + 12
    assert "cache_salt" not in stranger.asked[0]
    assert "fingerprint unknown" in said


@pytest.mark.slow
def test_a_point_whose_every_request_failed_ends_with_1(bench: Bench, stranger: Any) -> None:
    stranger.status = 500
    code, said, _ = bench(f"url={stranger.url}", "remote.vocab_size=5000", *HTTP)
    assert code == 1
    assert "HTTP 500, 6 times, for example: HTTP 500: data:" in said
    assert "TTFT" not in said


@pytest.mark.slow
def test_ctrl_c_shows_what_was_measured_and_leaves_nothing_behind(stranger: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    endless = ("workload.num_requests=1000000", "max_seconds=null", "repetitions=1", "remote.vocab_size=5000")
    program = [
        sys.executable,
        "-P",
        "-c",
        "from turnout.server.cli.main import main; main()",
        "bench",
        f"url={stranger.url}",
    ]
    with (tmp_path / "log").open("wb") as log:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
        process = subprocess.Popen([*program, *HTTP, *endless, f"out={out}"], stdout=log, stderr=log, process_group=0)
        signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 120
        while len(stranger.asked) < 20:
            assert time.monotonic() < deadline
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 1  # the generator
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert "interrupted: these are the numbers up to then" in (tmp_path / "log").read_text()
    point = json.loads(out.read_text())["points"][0]
    assert point["interrupted"] is True
    assert 1 <= point["median"]["requests.finished"] <= len(stranger.asked)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@every(
    ("args", "complaint"),
    [
        (["workload=nothing"], "Could not find 'workload/nothing'"),
        (["scheduler=fcfs,nothing"], "scheduler=nothing: there is no such choice"),
        (["concurrency=0"], "concurrency must be at least 1, got 0"),
        (["repetitions=0"], "repetitions must be at least 1, got 0"),
        (["warmup=-1"], "warmup must be at least 0, got -1"),
        (["max_seconds=0"], "max_seconds must be above 0, or null, got 0"),
        (["temperature=3"], "temperature must be between 0 and 2, got 3"),
        (["pareto=fast"], "pareto must be one of ttft.p50,"),
        (["target.itl=0"], "target.itl must be above 0, or null, got 0"),
        (["equality.num_prompts=0"], "equality.num_prompts must be at least 1, got 0"),
        (["remote.timeout=0"], "remote.timeout must be above 0, got 0"),
        (["workload=interference", "concurrency=2"], "concurrency does not go with workload=interference"),
        (["url=127.0.0.1:8000"], "url must begin with http:// or https://, got '127.0.0.1:8000'"),
        (["url=http://127.0.0.1:9", "serve=true"], "url is a server that runs already, serve=true starts one"),
        (["url=http://127.0.0.1:9", "ab=true"], "ab=true compares engines in this process"),
        (["url=http://127.0.0.1:9", "scheduler=fcfs"], "scheduler=fcfs says how an engine is composed, but url names"),
        (["url=http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models cannot be reached: "),
        (["model=/no/such/model"], "/no/such/model"),
        (["limits.max_model_len=3", *LOAD], "leaves no room for a prompt in a context of 3: lower workload.output"),
        (["out=no/folder/out.json"], "out=no/folder/out.json: there is no folder no/folder"),
        (["plot=a.bmp"], "plot=a.bmp: a picture is a file that ends in .svg, .png, .pdf"),
        (["latency=analytic"], "latency"),
        (["prompt"], "'prompt' is no override"),
        (["--config-dir", "no/folder"], "--config-dir no/folder: there is no such folder"),
        (["concurrency=1,2", "--cfg", "job"], "--cfg shows one composition; the comma lists make 2"),
    ],
)
def test_a_wrong_command_says_what_is_wrong_and_ends_with_2(bench: Bench, args: list[str], complaint: str) -> None:
    code, _, said = bench(*args)
    assert code == 2
    assert complaint in said
    assert "Traceback" not in said


def test_what_was_measured_before_a_point_that_cannot_be_is_shown(bench: Bench) -> None:
    code, said, complaint = bench("limits.max_model_len=100,5000", *FAST)
    assert code == 2
    assert "limits.max_model_len=100" in said
    assert "limits.max_model_len is 5000, but the model was made for 512 tokens" in complaint


def test_hydra_shows_the_composition(bench: Bench) -> None:
    code, said, _ = bench("scheduler=fair", "workload=agents", "--cfg", "job")
    assert code == 0
    assert "turns: 10" in said


@pytest.mark.slow
def test_pictures_show_the_front_and_latency_against_load(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.svg"
    load = [arg for arg in FAST if arg != "concurrency=2"]
    code, said, _ = bench("concurrency=1,2", *load, "repetitions=1", f"plot={picture}")
    assert code == 0
    for title in ("throughput against latency", "latency", "TTFT", "ITL"):
        assert f"<!-- {title} -->" in picture.read_text()
    assert f"{picture} shows them" in said


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else there(name, *a))
    code, _, said = bench("plot=a.svg")
    assert code == 2
    assert "pip install 'turnout[plot]'" in said


def test_every_option_is_in_the_guide_with_its_default() -> None:
    rows: dict[str, str] = {}
    for line in GUIDE.read_text().splitlines():
        if line.startswith("| `"):
            rows |= dict.fromkeys(re.findall(r"`([\w.]+)`", line.split("|")[1]), line)
    engine = {field.name for field in fields(BenchConfig.__mro__[1])} | {"workload", "remote", "target", "equality"}
    options: dict[str, Any] = {f.name: f.default for f in fields(BenchConfig) if f.name not in engine}
    for prefix, kind in (("remote.", Remote), ("equality.", Equality)):
        options |= {prefix + field.name: field.default for field in fields(kind)}
    for name, default in options.items():
        shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        assert f"`{shown}`" in rows[name], f"{name}={default}: {rows[name]}"


@pytest.mark.parametrize(
    "line",
    [
        line.partition("#")[0].split()[2:]
        for line in (GUIDE.read_text().splitlines() if GUIDE.exists() else [])
        if line.startswith("turnout bench")
    ],
    ids=" ".join,
)
def test_the_examples_of_the_guide_compose(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").touch()
    found = plugins.load()
    for point in expand([arg for arg in line if not arg.startswith("-")], found):
        assert isinstance(command._maker(point, found, [])(), BenchConfig)
