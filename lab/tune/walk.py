"""The method: baseline, goal, one variable at a time, special loads, and whether the answers are still the same.

    measure the baseline ─▶ learn its step times ─▶ is the simulator right about it?
        for each variable:   try every value (in the simulator where it is right, else on the engine)
                             measure the best of them on the engine, between two runs without it
    the result between two runs of the baseline ─▶ compare answers ─▶ simulate special loads

Only what was measured on the engine is kept; the simulator proposes. A machine drifts, so a change is measured between two runs of
what it is to replace, and must be better than both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from turnout.compose.plugins import PluginError, Plugins
from turnout.core.types import ContractError, ModelError
from turnout.lab.bench.equality import EqualityJudge
from turnout.lab.tune.goal import Goal, Outcome, better, worst
from turnout.lab.tune.load import Same
from turnout.lab.tune.trials import Law, Make, Measured, OnProgress, Trials
from turnout.lab.tune.variables import UNSEEN, Change, changes, check, merged
from turnout.lab.workload.synthetic import Bursts, Interference, Synthetic
from turnout.server.cli.overrides import Usage

Compose = Callable[[Mapping[str, str]], Make]  # raises for what cannot be composed
Values = dict[str, Any]
SPECIAL_REQUESTS = 100  # of each special load


class Beside(NamedTuple):
    """A run between two of what it is to replace."""

    before: Measured
    measured: Measured
    after: Measured

    def holds(self, goal: Goal, gain: float) -> bool:
        """It is better than both."""
        return all(better(self.measured.outcome, other.outcome, goal, gain) for other in (self.before, self.after))

    def rival(self, goal: Goal) -> Measured:
        """The better one of the two."""
        return self.after if better(self.after.outcome, self.before.outcome, goal, 0.0) else self.before


@dataclass
class Tried:
    """One value of one variable."""

    change: Change
    simulated: Outcome | None = None
    measured: Measured | None = None  # on the engine, where the simulator does not propose
    confirmed: Beside | None = None  # of the best value alone
    kept: bool = False
    refused: str | None = None  # why it could not be tried


@dataclass
class Walk:
    """Everything that was found."""

    baseline: Measured
    law: Law
    promised: Outcome  # the baseline in the simulator
    trusted: bool
    tried: list[Tried] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)  # of the result
    final: Beside | None = None  # the result between two runs of the baseline; None: nothing was kept
    equality: Values | None = None  # of the result's answers with the baseline's; None: nothing was kept
    special: dict[str, tuple[Outcome, Outcome]] = field(default_factory=dict)  # (baseline, result), simulated
    held: bool = False  # the result is better than the baseline when both are measured again


class Tuner:
    """One walk from the composition that `overrides` make."""

    def __init__(
        self,
        overrides: Mapping[str, str],
        compose: Compose,
        found: Plugins,
        trials: Trials,
        judge: EqualityJudge,
        on_progress: OnProgress,
    ) -> None:
        self._start, self._compose, self._found, self._on_progress = dict(overrides), compose, found, on_progress
        self._trials, self._judge = trials, judge
        self._make = compose(overrides)
        config = self._make()
        self._goal: Goal = config.target
        self._gain, self._trust = config.gain, config.trust
        self._names = check(config.variables)

    def run(self) -> Walk:
        """Raises ValueError when the baseline cannot be measured, RuntimeError when an engine fails."""
        walk = self._baseline()
        for number, name in enumerate(self._names, 1):
            self._on_progress(f"{number}/{len(self._names)} {name}", 0)
            self._variable(name, walk)
        if walk.overrides != self._start:
            make = self._compose(walk.overrides)
            self._on_progress("measuring the result beside the baseline", 0)
            walk.final = self._beside(self._make, make)
            walk.held = walk.final.holds(self._goal, self._gain)
            if not walk.held:
                walk.overrides = dict(self._start)
                return walk
            with self._trials.engine(make) as engine:
                self._on_progress("comparing answers", 0)
                walk.equality = self._judge.of(engine, "the result")
            self._specials(walk, make)
        return walk

    def _baseline(self) -> Walk:
        self._on_progress("learning step times from the baseline", 0)
        with tempfile.TemporaryDirectory(prefix="turnout-tune-") as folder:
            law = self._trials.learn(self._make, Path(folder))
        with self._trials.engine(self._make) as engine:
            self._on_progress("measuring the baseline", 0)
            baseline = self._trials.on(engine, self._make)
            self._judge.of(engine, "the baseline")
        promised = self._trials.simulate(self._make, law)
        return Walk(baseline, law, promised, self._right(law, promised, baseline.outcome), overrides=dict(self._start))

    def _right(self, law: Law, promised: Outcome, measured: Outcome) -> bool:
        """Whether the simulator may propose: it is right about steps it has not seen, and about the baseline."""
        pairs = [(promised.output_tokens, measured.output_tokens)]
        pairs += [(promised.p99[name], measured.p99[name]) for name in self._goal.bounds]
        off = [abs(guess / real - 1.0) for guess, real in pairs if real]
        return max([law.median_error, *off]) <= self._trust

    def _variable(self, name: str, walk: Walk) -> None:
        make = self._compose(walk.overrides)
        trials = [Tried(change) for change in changes(name, make(), self._found)]
        walk.tried += trials
        simulating = walk.trusted and name not in UNSEEN
        now = self._trials.simulate(make, walk.law) if simulating else self._trials.measure(make).outcome
        best: Tried | None = None
        for tried in trials:
            outcome = self._try(tried, walk, simulating=simulating)
            if outcome is not None and better(outcome, now, self._goal, self._gain):
                best, now = tried, outcome
        if best is None:
            return
        self._on_progress(f"measuring {best.change} between two runs without it", 0)
        changed = merged(walk.overrides, best.change)
        try:
            best.confirmed = self._beside(make, self._compose(changed))
        except (ValueError, Usage, PluginError, ModelError, ContractError) as error:
            best.refused = str(error)
            return
        if best.confirmed.holds(self._goal, self._gain):
            best.kept, walk.overrides = True, changed

    def _beside(self, without: Make, changed: Make) -> Beside:
        return Beside(self._trials.measure(without), self._trials.measure(changed), self._trials.measure(without))

    def _try(self, tried: Tried, walk: Walk, *, simulating: bool) -> Outcome | None:
        try:
            make = self._compose(merged(walk.overrides, tried.change))
            if simulating:
                tried.simulated = self._trials.simulate(make, walk.law)
                return tried.simulated
            self._on_progress(f"measuring {tried.change}", 0)
            tried.measured = self._trials.measure(make)
            return tried.measured.outcome
        except (ValueError, Usage, PluginError, ModelError, ContractError) as error:
            tried.refused = str(error)
            return None

    def _specials(self, walk: Walk, make: Make) -> None:
        """Loads that the workload may not have shown: simulated, before and after."""
        for name, load in special_loads(walk).items():
            self._on_progress(f"simulating {name}", 0)
            outcomes = [
                self._trials.simulate(m, walk.law, Same(load, 4, SPECIAL_REQUESTS, self._room(walk, m)))
                for m in (self._make, make)
            ]
            walk.special[name] = (outcomes[0], outcomes[1])

    def _room(self, walk: Walk, make: Make) -> int:
        blocks = make().blocks
        held = blocks.num_blocks * blocks.block_size if blocks.num_blocks else walk.law.capacity
        return min(held, walk.law.max_model_len)


def special_loads(walk: Walk) -> dict[str, Synthetic]:
    """Bursts at twice the rate that was served, and long prompts between streams; lengths as measured."""
    numbers = walk.baseline.numbers
    count = max(1.0, numbers["requests.finished"])
    prompt = max(1, round(numbers["tokens.prompt"] / count))
    output = max(1, round(numbers["tokens.output"] / count))
    document = max(1, min(8 * prompt, walk.law.max_model_len // 2, walk.law.capacity // 2))
    rate = 2 * numbers["throughput.requests"]
    pause = 4 * numbers["e2e.p50"] or 1.0  # a few answers between two documents
    return {
        "bursts": Bursts(rate=rate, prompt=prompt, output=output),
        "interference": Interference(prompt=prompt, output=output, document=document, every=pause),
    }


def regressions(walk: Walk, goal: Goal, gain: float) -> list[str]:
    """Special loads on which the result is worse than the baseline, a sentence each."""
    said = []
    for name, (before, after) in walk.special.items():
        for kind in ("ttft", "itl"):
            if after.p99[kind] > before.p99[kind] * (1 + max(gain, 0.1)):
                change = f"from {before.p99[kind]:.3g} s to {after.p99[kind]:.3g} s"
                said.append(f"simulated {name}: {kind.upper()} p99 grows {change}")
    result = walk.final.measured if walk.final is not None and walk.held else walk.baseline
    if worst(result.outcome, goal) > 1.0:
        said.append("the goal is not reached: this is the nearest composition that was found")
    return said
