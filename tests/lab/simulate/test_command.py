"""`turnout simulate` as it is typed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from grids import every

from turnout.compose import plugins
from turnout.core import Draft, RequestView, hookimpl
from turnout.lab.simulate import command
from turnout.lab.simulate.config import LATENCIES, WORKLOADS, Capacity, SimulateConfig, Target
from turnout.lab.simulate.hardware import HARDWARE
from turnout.lab.simulate.points import expand
from turnout.server.cli import main
from turnout.server.cli.overrides import Usage

FAST = ("workload=poisson", "workload.num_requests=20", "workload.prompt=20", "workload.output=5")
CONSTANT = ("latency=constant", "latency.per_step=0.5", "blocks.num_blocks=200", "workload.rate=1.0")

Simulate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """Runs the command; its exit code, what it printed and what it complained."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["turnout"])
        with pytest.raises(SystemExit) as end:
            main.main(["simulate", *args])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


def points(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["points"]
    return found


def test_a_sweep_ends_in_one_table_and_one_file(simulate: Simulate, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, said, _ = simulate(
        "scheduler=fcfs,chunked_prefill", "preemption=recompute,swap", *FAST, *CONSTANT, f"out={out}"
    )
    assert code == 0
    for name in ("scheduler=fcfs preemption=recompute", "scheduler=chunked_prefill preemption=swap"):
        assert name in said
    for title in ("TTFT p99", "ITL p99", "goodput", "cache hits", "recomputed tokens", "every step takes 0.5 s"):
        assert said.count(title) == 1
    found = points(out)
    assert [p["point"]["scheduler"] for p in found] == ["fcfs", "fcfs", "chunked_prefill", "chunked_prefill"]
    assert [p["composition"]["preemption"]["name"] for p in found] == ["recompute", "swap"] * 2
    assert {p["requests"]["finished"] for p in found} == {20}
    assert found[0]["offered"] == 1.0
    assert found[0]["itl"]["p99"] == 0.5


def test_the_same_seed_writes_the_same_file(simulate: Simulate, tmp_path: Path) -> None:
    def written(name: str) -> list[dict[str, Any]]:
        assert simulate(*FAST, "workload.seed=7", f"out={tmp_path / name}")[0] == 0
        found = points(tmp_path / name)
        for point in found:
            del point["wall"]
            assert point["composition"]["workload"]["options"]["seed"] == 7
        return found

    assert written("a") == written("b")


def test_many_compositions_stand_below_each_other(simulate: Simulate) -> None:
    code, said, _ = simulate("--multirun", "workload.rate=1,2,3,4,5,6,7", *FAST, *CONSTANT[:-1])
    assert code == 0
    rows = [line for line in said.splitlines() if "workload.rate=" in line]
    assert len(rows) == 7
    assert "7/s" in rows[-1]


def test_a_file_is_a_workload(simulate: Simulate, tmp_path: Path) -> None:
    trace = tmp_path / "a, b.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,10,2\n2023-11-16 18:15:47,10,0\n")
    code, said, _ = simulate(f"workload='{trace}'")
    assert code == 0
    assert "left out, having no prompt or no answer: 1 requests" in said


def test_the_capacity_of_each_composition_is_found(simulate: Simulate, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("limits.max_num_seqs=1,2", "capacity.ttft_p99=3.0", f"out={out}")
    code, said, _ = simulate(*FAST, *CONSTANT, *options, "workload.num_requests=100")
    assert code == 0
    assert "highest rate under the bounds" in said
    one, two = points(out)
    assert one["capacity"]["rate"] < 0.4 * 0.5  # five steps of half a second: 0.4 a second when nobody minds the queue
    assert two["capacity"]["rate"] > 2.0 * one["capacity"]["rate"]
    assert one["ttft"]["p99"] <= 3.0
    assert one["offered"] == pytest.approx(one["capacity"]["rate"], abs=1e-6)


def test_clients_without_a_rate_have_a_capacity_too(simulate: Simulate, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, _, _ = simulate("capacity.itl_p99=0.05", "workload.num_requests=50", "capacity.precision=0.5", f"out={out}")
    assert code == 0
    assert points(out)[0]["capacity"]["rate"] > 1.0


@dataclass
class LastFirst:
    """A stranger's scheduler."""

    at_once: int = 1

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        for request in (*running, *waiting[::-1][: self.at_once - len(running)]):
            draft.take(request)


@dataclass
class Faulty:
    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        draft.take(waiting[0])
        draft.take(waiting[0])


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("stranger")

    @hookimpl
    def register_schedulers(register: Any) -> None:
        register("last_first", LastFirst)
        register("faulty", Faulty)

    module.register_schedulers = register_schedulers  # type: ignore[attr-defined]
    found = plugins.collect(entry_points(group="turnout"), {"stranger": module})
    monkeypatch.setattr(plugins, "_loaded", found)


@pytest.mark.usefixtures("stranger")
def test_a_strangers_scheduler_is_simulated_like_ours_and_its_option_goes_to_it_alone(
    simulate: Simulate, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    code, _, _ = simulate("scheduler=fcfs,last_first", "scheduler.at_once=3", *FAST, *CONSTANT, f"out={out}")
    assert code == 0
    ours, theirs = points(out)
    assert theirs["composition"]["scheduler"]["options"] == {"at_once": 3}
    assert ours["composition"]["scheduler"]["options"] == {}
    assert (theirs["steps"]["most_running"], theirs["requests"]["finished"]) == (3, 20)


@pytest.mark.usefixtures("stranger")
def test_a_scheduler_that_breaks_its_contract_is_named_with_the_rule(simulate: Simulate) -> None:
    code, _, complaint = simulate("scheduler=faulty", *FAST, *CONSTANT)
    assert code == 1
    assert "the scheduler Faulty failed" in complaint
    assert "already in this step" in complaint


def test_an_option_of_a_part_that_varies_goes_to_the_choices_that_have_it() -> None:
    found = plugins.load()
    made = expand(["scheduler=fcfs,chunked_prefill", "scheduler.chunk=64,128"], found)
    assert [point.varied for point in made] == [
        {"scheduler": "fcfs"},
        {"scheduler": "chunked_prefill", "scheduler.chunk": "64"},
        {"scheduler": "chunked_prefill", "scheduler.chunk": "128"},
    ]
    assert [point.name for point in expand(["workload.rate=range(1,3)"], found)] == [
        "workload.rate=1",
        "workload.rate=2",
    ]
    with pytest.raises(Usage, match="scheduler.chunks: none of the choices given for scheduler has this option"):
        expand(["scheduler=fcfs,chunked_prefill", "scheduler.chunks=64"], found)


@every(
    ("args", "complaint"),
    [
        (["workload=nothing"], "Could not find 'workload/nothing'"),
        (["workload=no/such.csv"], "workload=no/such.csv: there is no such file; workloads that need none are chat,"),
        (["scheduler=nothing"], "scheduler=nothing: there is no such choice. Installed here: chunked_prefill"),
        (["scheduler=fcfs,nothing"], "scheduler=nothing: there is no such choice"),
        (["workload.turns=3"], "Key 'turns' not in 'Chat'"),
        (["attention=torch"], "attention"),
        (["latency=constant"], "blocks.num_blocks is null"),
        (["latency=fitted", "blocks.num_blocks=10"], "latency.log is empty"),
        (["latency=fitted", "blocks.num_blocks=10", "latency.log=no/log"], "no/log cannot be read: No such file"),
        (["blocks.num_blocks=1"], "every request is refused"),
        (["target.ttft=0"], "target.ttft must be above 0, or null, got 0"),
        (["capacity.itl_p99=-1"], "capacity.itl_p99 must be above 0, or null, got -1"),
        (["window=0"], "window must be above 0, got 0"),
        (["out=no/folder/out.json"], "out=no/folder/out.json: there is no folder no/folder"),
        (["plot=a.bmp"], "plot=a.bmp: a picture is a file that ends in .svg, .png, .pdf"),
        (["prompt"], "'prompt' is no override"),
        (["workload.rate=1,2", "--cfg", "job"], "--cfg shows one composition; the comma lists make 2"),
        (["workload.seed=range(0,2000)"], "the comma lists make more than 1000 compositions"),
    ],
)
def test_a_wrong_command_says_what_is_wrong_and_ends_with_2(
    simulate: Simulate, args: list[str], complaint: str
) -> None:
    code, _, said = simulate(*args)
    assert code == 2
    assert complaint in said
    assert "Traceback" not in said


def test_a_bad_line_of_a_trace_ends_it_with_2_and_the_line(simulate: Simulate, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,10,2\n2023-11-16 18:15:46,x,2\n")
    code, _, said = simulate(f"workload={trace}")
    assert code == 2
    assert f"{trace}: line 3: ContextTokens must be a whole number" in said


def test_without_matplotlib_a_picture_is_refused_with_the_way_to_get_it(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else there(name, *a))
    code, _, said = simulate("plot=a.svg")
    assert code == 2
    assert "pip install 'turnout[plot]'" in said


@pytest.mark.slow
def test_pictures_show_queue_blocks_and_latency_against_load(simulate: Simulate, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.svg"
    code, said, _ = simulate("scheduler=fcfs,fair", "workload.rate=1,2", *FAST, *CONSTANT[:-1], f"plot={picture}")
    assert code == 0
    text = picture.read_text()
    for title in ("requests waiting", "blocks in use", "TTFT", "ITL", "requests per second asked"):
        assert f"<!-- {title} -->" in text
    assert "scheduler=fair p99" in text
    assert f"{picture} shows them" in said


def test_hydra_shows_the_composition(simulate: Simulate) -> None:
    code, said, _ = simulate("scheduler=fair", "workload=agents", "--cfg", "job")
    assert code == 0
    assert "turns: 10" in said


def test_every_option_is_in_the_guide_with_its_default() -> None:
    rows: dict[str, str] = {}
    for line in (Path(__file__).parents[3] / "docs/simulate.md").read_text().splitlines():
        if line.startswith("| `"):
            rows |= dict.fromkeys(re.findall(r"`([\w.]+)`", line.split("|")[1]), line)
    kinds: list[tuple[str, type]] = [("target.", Target), ("capacity.", Capacity)]
    kinds += [
        (f"{group}.", kind) for group, of in (("workload", WORKLOADS), ("latency", LATENCIES)) for kind in of.values()
    ]
    for prefix, kind in kinds:
        for option in fields(kind):
            row, default = rows[prefix + option.name], option.default
            shown = f"{default:g}" if isinstance(default, float) else "null" if default is None else str(default)
            assert shown in row, f"{prefix}{option.name}={default}: {row}"
    for name in ("window", "out", "plot"):
        assert f"`{SimulateConfig.__dataclass_fields__[name].default or 'null'}`" in rows[name]
    for name in (*WORKLOADS, *HARDWARE):
        assert name in rows or name == "trace"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        line.partition("#")[0].split()[2:]
        for line in (Path(__file__).parents[3] / "docs/simulate.md").read_text().splitlines()
        if line.startswith("turnout simulate") and "FILE" not in line
    ],
    ids=" ".join,
)
def test_the_examples_of_the_guide_compose(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("trace.csv", "day.jsonl"):
        (tmp_path / name).touch()
    found = plugins.load()
    for point in expand(line, found):
        made = command._maker(point, [], found)()
        assert made.workload is not command._maker(point, [], found)().workload  # state is never shared
