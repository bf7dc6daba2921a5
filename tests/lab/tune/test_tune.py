"""`turnout tune`: what counts as better, what is tried, and that what it finds is so."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from grids import every
from virtual import Clock, timed_engine

from turnout.compose import plugins
from turnout.compose.config import Config
from turnout.core.engine import Engine
from turnout.core.types import Request
from turnout.lab.simulate.points import expand
from turnout.lab.tune import command
from turnout.lab.tune.composition import preset
from turnout.lab.tune.config import TuneConfig
from turnout.lab.tune.goal import Goal, Outcome, better
from turnout.lab.tune.load import Same
from turnout.lab.tune.report import evidence, markdown, rows
from turnout.lab.tune.trials import Trials
from turnout.lab.tune.variables import NAMES, Change, changes, merged
from turnout.lab.tune.walk import Tuner, Walk
from turnout.lab.workload.arrivals import Arrival, prompt, sampling
from turnout.lab.workload.synthetic import Chat
from turnout.server.cli import main
from turnout.server.cli.overrides import checked, objects, try_composing

ANY, TTFT = Goal(), Goal(ttft_p99=1.0)


def outcome(tokens: float, ttft: float = 0.5, itl: float = 0.1, *, good: bool = True) -> Outcome:
    return Outcome(tokens, {"ttft": ttft, "itl": itl, "e2e": 1.0}, good)


@pytest.mark.parametrize(
    ("one", "other", "goal", "expected"),
    [
        (outcome(110), outcome(100), ANY, True),
        (outcome(102), outcome(100), ANY, False),  # not by the gain
        (outcome(50, 0.9), outcome(100, 2.0), TTFT, True),  # the bound comes first
        (outcome(50, 1.5), outcome(100, 2.0), TTFT, True),  # nearer to it
        (outcome(110, 0.99), outcome(100, 0.2), TTFT, True),  # both keep it: throughput
        (outcome(100, 0.2), outcome(100, 0.9), TTFT, True),  # as fast: room under it
        (outcome(100, 0.9), outcome(100, 0.2), TTFT, False),
        (outcome(500, good=False), outcome(100), ANY, False),  # requests failed
        (outcome(100), outcome(500, good=False), ANY, True),
    ],
)
def test_bounds_come_before_throughput_and_failures_before_both(
    one: Outcome, other: Outcome, goal: Goal, expected: bool
) -> None:
    assert better(one, other, goal, 0.05) is expected
    if expected:
        assert not better(other, one, goal, 0.05)


def config_of(*overrides: str) -> TuneConfig:
    found = plugins.load()
    made = objects(try_composing("tune", checked(list(overrides), found), found), found)
    assert isinstance(made, TuneConfig)
    return made


def test_every_other_value_of_a_variable_is_tried() -> None:
    found = plugins.load()

    def values(name: str, *overrides: str) -> list[str]:
        return [change.value for change in changes(name, config_of(*overrides), found)]

    assert set(values("scheduler")) >= {"chunked_prefill", "fair", "priority"}
    assert "fcfs" not in values("scheduler")
    assert values("scheduler.chunk") == []  # fcfs has none
    assert values("scheduler.chunk", "scheduler=chunked_prefill") == ["64", "128", "512", "1024"]
    assert values("limits.max_num_seqs", "limits.max_num_seqs=2") == ["1", "4", "8"]
    assert values("blocks.block_size") == ["8", "32", "64"]
    assert values("blocks") == ["radix"]


def test_another_choice_takes_no_options_of_the_last_one_along() -> None:
    before = {"scheduler": "chunked_prefill", "scheduler.chunk": "64", "limits.max_num_seqs": "8"}
    assert merged(before, Change("scheduler", "fcfs")) == {"scheduler": "fcfs", "limits.max_num_seqs": "8"}
    assert merged(before, Change("scheduler.chunk", "128")) == before | {"scheduler.chunk": "128"}
    memory = {"blocks": "paged", "blocks.num_blocks": "50", "blocks.ttl": "3"}
    assert merged(memory, Change("blocks", "radix")) == {"blocks.num_blocks": "50", "blocks": "radix"}


def test_engine_and_simulator_get_the_same_requests_whatever_their_seats() -> None:
    def lengths(seats: int) -> list[tuple[str, int]]:
        found, arrivals = [], list(Same(Chat(num_requests=50), 3, 7, 60).arrivals(1.0, seats))
        while arrivals:
            arrival: Arrival = arrivals.pop(0)
            found.append((arrival.request.id, arrival.request.num_prompt))
            follow = arrival.then(1.0) if arrival.then else None
            arrivals += [follow] if follow is not None else []
        return found

    assert lengths(1) == lengths(99)
    assert len(lengths(5)) == 7
    assert max(length for _, length in lengths(5)) < 60


class Day:
    """Streams and, in the middle of them, long prompts: what chunked prefill is for."""

    def asked(self, *_: object) -> None: ...
    def notes(self) -> list[str]:
        return []

    def arrivals(self, factor: float, seats: int) -> Any:
        for number in range(40):
            long = number % 8 == 7
            tokens, num = (800, 4) if long else (20, 30)
            yield Arrival(Request(f"r{number}", prompt(number, tokens), sampling(num), number * 0.05))


class Judge:
    """Compares nothing."""

    def __init__(self, verdict: str) -> None:
        self.verdict, self.asked = verdict, list[str]()

    def of(self, engine: Engine, name: str) -> dict[str, Any]:
        self.asked.append(name)
        return {"verdict": self.verdict, "against": "the baseline", "kl_mean": 0.0, "num_prompts": 3}


Tune = Callable[..., tuple[Walk, TuneConfig, Judge]]


@pytest.fixture
def tune() -> Tune:
    """A walk over engines whose time is made up, so that the simulator can know it."""
    found = plugins.load()

    def run(
        *overrides: str, slower: Callable[[TuneConfig], float] = lambda config: 1.0, verdict: str = "equivalent"
    ) -> tuple[Walk, TuneConfig, Judge]:
        now = Clock()

        def build(config: TuneConfig) -> Engine:
            nonlocal now
            factor = slower(config)
            law = [seconds * factor for seconds in (4e-3, 4e-4, 0.0, 5e-4, 0.0, 2e-4)]
            limits = config.limits
            engine, now = timed_engine(
                config.scheduler,
                law,
                num_blocks=config.blocks.num_blocks,
                blocks=config.blocks,
                block_size=config.blocks.block_size,
                preemption=config.preemption,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_num_seqs=limits.max_num_seqs,
                max_model_len=2000,
                hooks=found.manager,
            )
            return engine

        def sleep(seconds: float) -> None:
            now.now += seconds

        base = {"blocks.num_blocks": "2000", "repetitions": "1"}
        given = base | dict(override.split("=", 1) for override in overrides)

        def compose(changed: Any) -> Any:
            make = command._maker(changed, found, [])

            def made() -> TuneConfig:
                config = make()
                config.workload = Day()
                return config

            return made

        trials, judge = Trials(found.manager, lambda s, n: None, build, lambda: now(), sleep), Judge(verdict)
        walk = Tuner(given, compose, found, trials, judge, lambda s, n: None).run()  # type: ignore[arg-type]
        shown = command._maker(given, found, [])()
        return walk, shown, judge

    return run


@pytest.mark.slow
def test_what_the_simulator_proposes_and_the_engine_confirms_is_kept(tune: Tune) -> None:
    walk, config, judge = tune("target.itl_p99=0.06", "variables=[scheduler,scheduler.chunk,limits.max_num_seqs]")
    assert walk.trusted
    assert walk.law.median_error < 0.05
    assert walk.promised.output_tokens == pytest.approx(walk.baseline.outcome.output_tokens, rel=0.1)
    assert walk.baseline.outcome.p99["itl"] > 0.3  # a long prompt stops every stream
    assert walk.overrides["scheduler"] != "fcfs"
    assert walk.held
    assert walk.final is not None
    assert walk.final.measured.outcome.p99["itl"] < 0.5 * walk.baseline.outcome.p99["itl"]
    for tried in walk.tried:
        assert tried.measured is None  # the simulator proposed
        assert (tried.confirmed is not None) or not tried.kept
    assert judge.asked == ["the baseline", "the result"]
    assert set(walk.special) == {"bursts", "interference"}
    found = evidence(walk, config)
    assert found["answers"] == "equivalent"
    assert found["changes"]
    assert any(row[-1] == "★" and "without it" in row[2] for row in rows(found))
    assert "all together: output tokens/s" in markdown(found)


@pytest.mark.slow
def test_what_the_simulator_promises_and_the_engine_does_not_keep_is_not_kept(tune: Tune) -> None:
    def slow_unless_fcfs(config: TuneConfig) -> float:
        return 1.0 if type(config.scheduler).__name__ == "FCFS" else 20.0

    walk, config, _ = tune("target.itl_p99=0.06", "variables=[scheduler]", slower=slow_unless_fcfs)
    assert not any(tried.kept for tried in walk.tried)
    confirmed = [tried for tried in walk.tried if tried.confirmed is not None]
    assert len(confirmed) == 1
    assert confirmed[0].simulated is not None
    assert confirmed[0].simulated.p99["itl"] < 0.2
    assert walk.overrides.get("scheduler") is None
    assert evidence(walk, config)["summary"] == ["nothing that was tried is better than the baseline: it is the result"]


def test_where_the_simulator_is_wrong_about_the_baseline_everything_is_measured(tune: Tune) -> None:
    seen: list[int] = []

    def slower_after_the_recording(config: TuneConfig) -> float:
        seen.append(1)
        return 1.0 if len(seen) == 1 else 3.0

    walk, config, _ = tune("variables=[preemption]", slower=slower_after_the_recording)
    assert not walk.trusted
    assert all(tried.measured is not None for tried in walk.tried)
    assert "more than trust=0.2: every value was measured on the engine" in evidence(walk, config)["remarks"][0]


@pytest.mark.slow
def test_a_block_size_is_always_measured(tune: Tune) -> None:
    walk, _, _ = tune("variables=[blocks.block_size]")
    assert walk.trusted
    assert all(tried.simulated is None and tried.measured is not None for tried in walk.tried)


def test_a_composition_is_a_preset_that_composes_to_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plugins.load()
    config = config_of("scheduler=chunked_prefill", "scheduler.chunk=64", "blocks=radix", "limits.max_num_seqs=7")
    text = preset(config, found, ["why"])
    assert text.startswith("# @package _global_\n# why\n")
    assert yaml.safe_load(text)["limits"]["max_num_seqs"] == 7
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/tuned.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["turnout"])
    main.main(["serve", "--config-dir", str(tmp_path), "experiment=tuned", "--cfg", "job"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["scheduler"]["chunk"], shown["limits"]["max_num_seqs"]) == (64, 7)
    assert "min_copied" in shown["blocks"]
    for name in ("bench", "tune"):
        with pytest.raises(SystemExit) as end:
            main.main(
                [name, "--config-dir", str(tmp_path), "experiment=tuned", "limits.max_num_seqs=9", "--cfg", "job"]
            )
        assert end.value.code == 0
        shown = yaml.safe_load(capsys.readouterr().out)
        assert (shown["scheduler"]["chunk"], shown["limits"]["max_num_seqs"]) == (64, 9)


@every(
    ("args", "complaint"),
    [
        (["scheduler=fcfs,fair"], "the comma lists make 2 compositions; turnout tune starts from one"),
        (["--multirun"], "turnout tune starts from one composition and varies it itself"),
        (["variables=[speed]"], f"variables: there is no 'speed'; what can be changed is {', '.join(NAMES)}"),
        (["target.ttft_p99=0"], "target.ttft_p99 must be above 0, or null, got 0"),
        (["gain=2"], "gain must be between 0 and 1, got 2"),
        (["clients=0"], "clients must be at least 1, got 0"),
        (["composition=tuned"], "composition=tuned: the file must end in .yaml"),
        (["out=no/folder/a.json"], "out=no/folder/a.json: there is no folder no/folder"),
        (["workload=no/such.csv"], "there is no such file"),
        (["model=/no/such/model"], "/no/such/model"),
        (["nonsense"], "'nonsense' is no override"),
    ],
)
def test_a_wrong_command_says_what_is_wrong_and_ends_with_2(
    args: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["turnout"])
    with pytest.raises(SystemExit) as end:
        main.main(["tune", *args])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert complaint in said
    assert "Traceback" not in said


GUIDE = Path(__file__).parents[3] / "docs/tune.md"


def test_every_option_is_in_the_guide_with_its_default() -> None:
    rows_: dict[str, str] = {}
    for line in GUIDE.read_text().splitlines():
        if line.startswith("| `"):
            rows_ |= dict.fromkeys(re.findall(r"`([\w.]+)`", line.split("|")[1]), line)
    inherited = {field.name for field in fields(Config)} | {"workload", "target", "equality"}
    options: dict[str, Any] = {f.name: f.default for f in fields(TuneConfig) if f.name not in inherited}
    options |= {f"target.{field.name}": field.default for field in fields(Goal)} | {"variables": []}
    for name, default in options.items():
        assert f"`{'null' if default is None else default}`" in rows_[name], f"{name}={default}: {rows_[name]}"
    for name in NAMES:
        assert f"`{name}`" in GUIDE.read_text()


@pytest.mark.parametrize(
    "line",
    [
        line.partition("#")[0].split()[2:]
        for line in (GUIDE.read_text().splitlines() if GUIDE.exists() else [])
        if line.startswith("turnout tune")
    ],
    ids=" ".join,
)
def test_the_examples_of_the_guide_compose(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").touch()
    found = plugins.load()
    (point,) = expand(line, found)
    assert isinstance(command._maker(dict(o.split("=", 1) for o in point.overrides), found, [])(), TuneConfig)
