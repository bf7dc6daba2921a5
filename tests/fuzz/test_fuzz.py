"""Random traces over every composition of ours: none goes wrong, and they meet what they are made for."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from turnout.compose import plugins
from turnout.testing.audit import counters
from turnout.testing.fuzz import Space, installed, main, search
from turnout.testing.shuffle import Shuffle
from turnout.testing.traces import Fault
from turnout.testing.watched import Watched

TRACES = 1000  # over all schedulers
SITUATIONS = (
    "preemptions_recompute",
    "preemptions_swap",
    "swap_fallbacks",
    "swapped_blocks_in",
    "recomputed_tokens",
    "cached_tokens",
    "blocks.copied",
    "blocks.evicted",
    "blocks.expired",
    "blocks.tier_out",
    "blocks.tier_in",
    "abort: waiting",
    "abort: swapped",
    "abort: blocked",
    "abort: running",
    "abort: gone",
    "drop: kept",
    "kept given up",
    "child of a shared prefix",
    "failed: before",
    "failed: after",
    "failed: one",
    "step undone",
)


@dataclass
class Run:
    """The short run."""

    space: Space
    faults: list[Fault] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)  # situation -> traces

    def passed(self, engine: Watched) -> None:
        counted = {name for name, count in counters(engine.engine.stats).items() if count}
        self.met.update(counted | set(+engine.met))


@pytest.mark.parametrize("traces", [100, pytest.param(TRACES, marks=pytest.mark.slow)])
def test_no_trace_goes_wrong_and_many_meet_every_situation(traces: int) -> None:
    run = Run(installed(package="turnout"))
    schedulers = dict.fromkeys(run.space.scheduler)
    for start, scheduler in enumerate(schedulers):
        fault = search(replace(run.space, scheduler=[scheduler]), traces // len(schedulers), start, run.passed)
        run.faults += [fault] if fault else []
    assert not run.faults, "\n\n".join(fault.test for fault in run.faults)
    if traces == TRACES:
        assert [name for name in SITUATIONS if run.met[name] < 3] == []


def test_every_component_of_ours_takes_part() -> None:
    found, space = plugins.load(), installed(package="turnout")
    for slot in ("scheduler", "preemption", "blocks"):
        ours = {
            choice.component for choice in found.choices.values() if (choice.slot, choice.package) == (slot, "turnout")
        }
        assert set(getattr(space, slot)) == ours | ({Shuffle} if slot == "scheduler" else set())


def test_one_seed_plays_the_same_traces_each_time_and_another_others() -> None:
    def steps(start: int) -> list[int]:
        seen: list[int] = []
        assert (
            search(installed(package="turnout"), 20, start, lambda engine: seen.append(engine.engine._num_steps))
            is None
        )
        return seen

    assert steps(1) == steps(1) != steps(2)


def test_the_command_says_how_much_it_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seconds=0", "seed=3", "traces=10", "scheduler=fcfs,shuffle", "preemption=swap"]) == 0
    assert "10 traces, no fault; the last seed was 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "reason"),
    [("second=3", "there is no second; the arguments are"), ("scheduler=nobody", "there is no such choice")],
)
def test_wrong_arguments_are_told(argument: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 2
    assert reason in capsys.readouterr().err


def test_without_hypothesis_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "turnout.testing.fuzz")
    with pytest.raises(ModuleNotFoundError, match="the fuzzer needs hypothesis: pip install"):
        importlib.import_module("turnout.testing.fuzz")
