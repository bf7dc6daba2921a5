"""The method: baseline, goal, one variable at a time, special loads, and whether the answers are still the same.

    measure the baseline ─▶ learn its step times ─▶ is the simulator right about it?
        for each variable:   try every value (in the simulator where it is right, else on the engine)
                             measure the best of them on the engine: kept if it is nearer to the goal there
    compare answers ─▶ simulate special loads

Only what was measured on the engine is kept; the simulator proposes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnout.core.plugins import PluginError, Plugins
from turnout.core.types import ContractError, ModelError
from turnout.server.bench.equality import Judge
from turnout.server.overrides import Usage
from turnout.server.simulate.synthetic import Bursts, Interference, Synthetic
from turnout.server.tune.goal import Goal, Outcome, better, worst
from turnout.server.tune.load import Same
from turnout.server.tune.trials import Law, Make, Measured, Tell, engine_of, learn, measure, simulate
from turnout.server.tune.variables import UNSEEN, Change, changes, check, merged

Compose = Callable[[Mapping[str, str]], Make]  # raises for what cannot be composed
Values = dict[str, Any]
SPECIAL_REQUESTS = 100  # of each special load


@dataclass
class Tried:
    """One value of one variable."""

    change: Change
    simulated: Outcome | None = None
    measured: Measured | None = None
    kept: bool = False
    refused: str | None = None  # why it could not be tried


@dataclass
class Walk:
    """Everything that was found; `kept` changes the baseline into the result."""

    baseline: Measured
    law: Law
    promised: Outcome  # the baseline in the simulator
    trusted: bool
    tried: list[Tried] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)
    best: Measured | None = None  # None: nothing was kept
    equality: Values | None = None  # of the result's answers with the baseline's; None: nothing was kept
    special: dict[str, tuple[Outcome, Outcome]] = field(default_factory=dict)  # (baseline, result), simulated


class Tuner:
    """One walk from the composition that `overrides` make."""

    def __init__(self, overrides: Mapping[str, str], compose: Compose, found: Plugins, tell: Tell) -> None:
        self._start, self._compose, self._found, self._tell = dict(overrides), compose, found, tell
        self._make = compose(overrides)
        config = self._make()
        self._goal: Goal = config.target
        self._gain, self._trust = config.gain, config.trust
        self._names = check(config.variables)
        self._judge = Judge(config.equality)

    def run(self) -> Walk:
        """Raises ValueError when the baseline cannot be measured, RuntimeError when an engine fails."""
        walk = self._baseline()
        for number, name in enumerate(self._names, 1):
            self._tell(f"{number}/{len(self._names)} {name}", 0)
            self._variable(name, walk)
        if walk.best is not None:
            make = self._compose(walk.overrides)
            with engine_of(make, self._tell) as engine:
                self._tell("comparing answers", 0)
                walk.equality = self._judge.of(engine, "the result")
            self._specials(walk, make)
        return walk

    def _baseline(self) -> Walk:
        self._tell("learning step times from the baseline", 0)
        with tempfile.TemporaryDirectory(prefix="turnout-tune-") as folder:
            law = learn(self._make, self._found.manager, Path(folder), self._tell)
        with engine_of(self._make, self._tell) as engine:
            self._tell("measuring the baseline", 0)
            baseline = measure(engine, self._make, self._tell)
            self._judge.of(engine, "the baseline")
        promised = simulate(self._make, law, self._found.manager)
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
        now = simulate(make, walk.law, self._found.manager) if simulating else (walk.best or walk.baseline).outcome
        best: Tried | None = None
        for tried in trials:
            outcome = self._try(tried, walk, simulating=simulating)
            if outcome is not None and better(outcome, now, self._goal, self._gain):
                best, now = tried, outcome
        if best is None:
            return
        if best.measured is None:
            self._on_engine(best, walk)
        held = (walk.best or walk.baseline).outcome
        if best.measured is not None and better(best.measured.outcome, held, self._goal, self._gain):
            best.kept, walk.best = True, best.measured
            walk.overrides = merged(walk.overrides, best.change)

    def _try(self, tried: Tried, walk: Walk, *, simulating: bool) -> Outcome | None:
        if not simulating:
            self._on_engine(tried, walk)
            return None if tried.measured is None else tried.measured.outcome
        try:
            make = self._compose(merged(walk.overrides, tried.change))
            tried.simulated = simulate(make, walk.law, self._found.manager)
        except (ValueError, Usage, PluginError, ContractError) as error:
            tried.refused = str(error)
        return tried.simulated

    def _on_engine(self, tried: Tried, walk: Walk) -> None:
        self._tell(f"measuring {tried.change}", 0)
        try:
            make = self._compose(merged(walk.overrides, tried.change))
            with engine_of(make, self._tell) as engine:
                tried.measured = measure(engine, make, self._tell)
        except (ValueError, Usage, PluginError, ModelError, ContractError) as error:
            tried.refused = str(error)

    def _specials(self, walk: Walk, make: Make) -> None:
        """Loads that the workload may not have shown: simulated, before and after."""
        for name, load in special_loads(walk).items():
            self._tell(f"simulating {name}", 0)
            outcomes = [
                simulate(m, walk.law, self._found.manager, Same(load, 4, SPECIAL_REQUESTS, self._room(walk, m)))
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
    if worst((walk.best or walk.baseline).outcome, goal) > 1.0:
        said.append("the goal is not reached: this is the nearest composition that was found")
    return said
