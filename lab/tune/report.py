"""The evidence: what was tried, what the simulator promised, what the engine did, what was kept. It decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turnout.compose.plugins import options_of
from turnout.lab.simulate.config import WORKLOADS
from turnout.lab.simulate.report import seconds
from turnout.lab.tune.config import TuneConfig
from turnout.lab.tune.goal import BOUNDED, Goal, Outcome, worst
from turnout.lab.tune.trials import Measured
from turnout.lab.tune.walk import Beside, Tried, Walk, regressions

if TYPE_CHECKING:
    from rich.console import Console

Values = dict[str, Any]
TITLES = ("step", "simulated", "measured", "kept")


def evidence(walk: Walk, config: TuneConfig) -> Values:
    """Everything as plain values."""
    goal = config.target
    result = walk.final.measured if walk.final is not None and walk.held else walk.baseline
    workload = config.workload
    name = next(name for name, kind in WORKLOADS.items() if kind is type(workload))
    answers = None if walk.equality is None else walk.equality["verdict"]
    return {
        "goal": {f"{name}_p99": bound for name, bound in goal.bounds.items()},
        "load": {
            "workload": {"name": name, "options": options_of(workload)},
            "clients": config.clients,
            "max_requests": config.max_requests,
            "repetitions": config.repetitions,
        },
        "simulator": {
            "trusted": walk.trusted,
            "trust": config.trust,
            "held_out_error_p50": walk.law.median_error,
            "held_out_error_p90": walk.law.p90_error,
            "baseline": _outcome(walk.promised),
        },
        "baseline": _measured(walk.baseline),
        "tried": [_tried(tried) for tried in walk.tried],
        "result": _measured(result),
        "final": None if walk.final is None else _beside(walk.final),
        "changes": [str(tried.change) for tried in walk.tried if tried.kept] if walk.held else [],
        "overrides": walk.overrides,
        "answers": answers,
        "equality": walk.equality,
        "special": {name: [_outcome(one) for one in pair] for name, pair in walk.special.items()},
        "remarks": _remarks(walk, config),
        "summary": _summary(walk, goal),
    }


def show(console: Console, result: Values) -> None:
    """One table and what must be known beside it."""
    from rich.table import Table

    made = Table(header_style="bold")
    for title in TITLES:
        made.add_column(title, overflow="fold")
    for row in rows(result):
        made.add_row(*row)
    console.print(made)
    for remark in (*result["remarks"], *result["summary"]):
        console.print(f"· {remark}", markup=False, highlight=False, soft_wrap=True)


def markdown(result: Values) -> str:
    """The same as a page."""
    lines = [TITLES, ("---",) * len(TITLES), *rows(result)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return (
        "# turnout tune\n\n"
        + table
        + "\n\n"
        + "\n".join(f"- {r}" for r in (*result["remarks"], *result["summary"]))
        + "\n"
    )


def rows(result: Values) -> list[tuple[str, ...]]:
    """A row for the baseline and for each value that was tried."""
    bounds = list(result["goal"]) or [f"{name}_p99" for name in BOUNDED[:2]]
    names = [bound.removesuffix("_p99") for bound in bounds]
    found: list[tuple[str, ...]] = [
        ("baseline", _cell(result["simulator"]["baseline"], names), _cell(result["baseline"], names), "")
    ]
    for tried in result["tried"]:
        step = tried["change"] + (f" (not possible: {tried['refused'][:120]})" if tried["refused"] else "")
        simulated, measured, sure = tried["simulated"], _cell(tried["measured"], names), tried["confirmed"]
        if sure is not None:
            others = f"{_cell(sure['before'], names)} and {_cell(sure['after'], names)}"
            measured = f"{_cell(sure['measured'], names)}; without it {others}"
        found.append((step, _cell(simulated, names), measured, "★" if tried["kept"] else ""))
    return found


def _cell(outcome: Mapping[str, Any] | None, names: Sequence[str]) -> str:
    if outcome is None:
        return ""
    latencies = ", ".join(f"{name.upper()} p99 {seconds(outcome['p99'][name])}" for name in names)
    failed = "" if outcome["good"] else ", requests failed"
    return f"{outcome['output_tokens']:,.1f} tokens/s, {latencies}{failed}"


def _outcome(outcome: Outcome) -> Values:
    return {"output_tokens": outcome.output_tokens, "p99": outcome.p99, "good": outcome.good}


def _measured(measured: Measured) -> Values:
    return _outcome(measured.outcome) | {"output_tokens_range": measured.spread, "median": measured.numbers}


def _beside(beside: Beside) -> Values:
    return {
        "before": _measured(beside.before),
        "measured": _measured(beside.measured),
        "after": _measured(beside.after),
    }


def _tried(tried: Tried) -> Values:
    return {
        "change": str(tried.change),
        "simulated": None if tried.simulated is None else _outcome(tried.simulated),
        "measured": None if tried.measured is None else _measured(tried.measured),
        "confirmed": None if tried.confirmed is None else _beside(tried.confirmed),
        "kept": tried.kept,
        "refused": tried.refused,
    }


def _remarks(walk: Walk, config: TuneConfig) -> list[str]:
    trusted = (
        "it proposes, the engine confirms"
        if walk.trusted
        else f"that is more than trust={config.trust:g}: every value was measured on the engine"
    )
    promised, real = walk.promised.output_tokens, walk.baseline.outcome.output_tokens
    learned = (
        f"simulator: step times learned from the baseline, off by {walk.law.median_error:.1%} in the median and "
        f"{walk.law.p90_error:.1%} at p90 on steps held out; it says {promised:,.1f} tokens/s of the baseline, which does "
        f"{real:,.1f}; {trusted}"
    )
    said = [learned, "a block size changes the kernels' own speed, so it is always measured"]
    if walk.equality is not None:
        kl = walk.equality["kl_mean"]
        said.append(f"answers: {walk.equality['verdict']} (KL {kl:.1e} over {walk.equality['num_prompts']} prompts)")
    for name, (before, after) in walk.special.items():
        pairs = [f"{m.upper()} p99 {seconds(before.p99[m])} → {seconds(after.p99[m])}" for m in ("ttft", "itl")]
        said.append(f"special load, simulated: {name}: {', '.join(pairs)}")
    return said + regressions(walk, config.target, config.gain)


def _summary(walk: Walk, goal: Goal) -> list[str]:
    if walk.final is None:
        return ["nothing that was tried is better than the baseline: it is the result"]
    said = [
        f"{tried.change}: {_gain(tried.confirmed.rival(goal).outcome, tried.confirmed.measured.outcome, goal)}"
        for tried in walk.tried
        if tried.kept and tried.confirmed is not None
    ]
    if not walk.held:
        return [
            *said,
            "all together these are not better than the baseline when both are measured again: it is the result",
        ]
    return [*said, f"all together: {_gain(walk.final.rival(goal).outcome, walk.final.measured.outcome, goal)}"]


def _gain(before: Outcome, after: Outcome, goal: Goal) -> str:
    names = list(goal.bounds) or list(BOUNDED[:2])
    parts = [f"output tokens/s {before.output_tokens:,.1f} → {after.output_tokens:,.1f}"]
    parts += [f"{name.upper()} p99 {seconds(before.p99[name])} → {seconds(after.p99[name])}" for name in names]
    kept = "" if not goal.bounds else ", goal reached" if worst(after, goal) <= 1.0 else ", goal not reached yet"
    return ", ".join(parts) + kept
