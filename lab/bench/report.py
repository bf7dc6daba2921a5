"""Results side by side: a table in the terminal, Markdown, JSON, pictures. It measures nothing.

A cell is the median over the repetitions; in brackets the least and the most.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.lab.bench.config import BenchConfig
from turnout.lab.bench.pareto import front
from turnout.lab.bench.summary import LATENCIES, PERCENTILES
from turnout.lab.simulate.report import WIDE, seconds

if TYPE_CHECKING:
    from rich.table import Table

Values = Mapping[str, Any]
Show = Callable[[Values], str]
SHORT = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2E p99", "output tokens/s", "goodput", "failed", "answers")
MARK = "★"


def publish(config: BenchConfig, found: dict[str, Any], names: Sequence[str]) -> None:
    """Show everything, and write the files that were asked for."""
    from rich.console import Console

    points = found["points"]
    for point, best in zip(points, pareto(points, config.pareto), strict=True):
        point["pareto"] = {"latency": config.pareto, "front": best}
    title, lines = rows(points)
    labels = [name or "the composition" for name in names]
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(labels, lines))
    for note in remarks(found, title):
        console.print(f"· {note}", style="dim", markup=False, highlight=False, soft_wrap=True)
    for path, text, what in (
        (config.out, json.dumps(found, indent=1, default=str) + "\n", "has all numbers"),
        (config.markdown, markdown(labels, lines, remarks(found, title)), "has the table"),
    ):
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
            console.print(f"{path} {what}", highlight=False, soft_wrap=True, markup=False)
    if config.plot is not None:
        from turnout.lab.bench.plots import draw

        draw(labels, points, config.pareto, config.plot)
        console.print(f"{config.plot} shows them", highlight=False, soft_wrap=True, markup=False)


def pareto(points: Sequence[Values], latency: str) -> list[bool]:
    """Which points no other beats in output tokens/s and this latency."""
    pairs = []
    for point in points:
        median = point["median"]
        known = median.get("requests.finished", 0) > 0
        pairs.append((median["throughput.output_tokens"], median[latency]) if known else None)
    return front(pairs)


def rows(points: Sequence[Values]) -> tuple[str, dict[str, list[str]]]:
    """What the front is about, and every row that has something to say."""
    latency = points[0]["pareto"]["latency"]
    title = f"{MARK} on the Pareto front of output tokens/s against {_named(latency)}"
    shown: dict[str, Show] = dict(MEASURES)
    if len(points) > 1:
        shown[MARK] = lambda point: MARK if point["pareto"]["front"] else ""
    lines = {name: [show(point) if point["repetitions"] else "" for point in points] for name, show in shown.items()}
    for name in sorted({tenant for point in points for run in point["repetitions"] for tenant in run["tenants"]}):
        for measure in ("ttft", "itl"):
            key = f"tenants.{name}.{measure}"
            lines[f"{name}: {measure.upper()} p50 / p99"] = [_pair(point, key) for point in points]
    return title if len(points) > 1 else "", {name: cells for name, cells in lines.items() if any(cells)}


def remarks(found: Values, title: str) -> list[str]:
    """Everything a reader must know beside the numbers, a sentence each."""
    points, where = found["points"], found["environment"]
    said = [title] if title else []
    for point in points:
        load, made = point["load"], point["generator"]
        said.append(
            f"load: {load['workload']['name']}, {load['kind']}; latencies count from the planned time; "
            f"{load['repetitions']} repetitions, {load['warmup']} requests to warm up; steady: {load['steady_window']}"
        )
        said.append(_generator(made | _most(points)))
        if _pressed(point):
            said.append("the generator was near its own limits: the server may be faster than these numbers")
        said += point["notes"]
        said += [f"{kind}, {entry['count']} times, for example: {entry['example']}" for kind, entry in _errors(point)]
        if point["interrupted"]:
            said.append("interrupted: these are the numbers up to then")
    gpus = f", {', '.join(where['gpus'])}" if where["gpus"] else ""
    said.append(
        f"{where['processor']}, {where['usable_cores']} cores, {where['threads']} threads{gpus}; load before it began "
        f"{where['load_average'][0]:g}; {', '.join(f'{name} {value}' for name, value in where['versions'].items())}; "
        f"source {where['git'] or 'not from git'}"
    )
    said.append("fingerprint " + ", ".join(dict.fromkeys(p["origin"].get("fingerprint") or "unknown" for p in points)))
    return list(dict.fromkeys(said))


def markdown(names: Sequence[str], lines: Mapping[str, Sequence[str]], notes: Sequence[str]) -> str:
    """A table with a row for each point, and the remarks."""
    titles = list(lines)
    made = [["composition", *titles], ["---", *["---:"] * len(titles)]]
    made += [[name, *(lines[title][i] for title in titles)] for i, name in enumerate(names)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in made)
    return "# turnout bench\n\n" + table + "\n\n" + "\n".join(f"- {note}" for note in notes) + "\n"


def _table(names: Sequence[str], lines: Mapping[str, Sequence[str]]) -> Table:
    """A column each for a few points, a row each for many."""
    from rich.table import Table

    made = Table(title_justify="left", header_style="bold")
    if len(names) <= WIDE:
        made.add_column("")
        for name in names:
            made.add_column(name, justify="right", overflow="fold")
        for title, cells in lines.items():
            made.add_row(title, *cells)
        return made
    made.add_column("composition", overflow="fold")
    kept = {title: cells for title, cells in lines.items() if title.startswith((*SHORT, MARK))}
    for title in kept:
        made.add_column(title, justify="right")
    for i, name in enumerate(names):
        made.add_row(name, *(cells[i] for cells in kept.values()))
    return made


def _number(key: str, show: Callable[[float], str]) -> Show:
    def cell(point: Values) -> str:
        if key not in point["median"]:
            return ""
        least, most = point["range"][key]
        spread = f" ({show(least)} … {show(most)})" if len(point["repetitions"]) > 1 else ""
        return show(point["median"][key]) + spread

    return cell


def _pair(point: Values, key: str) -> str:
    median = point["median"]
    return " / ".join(seconds(median[f"{key}.{p}"]) for p in ("p50", "p99")) if f"{key}.p50" in median else ""


def _latency(name: str) -> dict[str, Show]:
    def only(show: Show) -> Show:
        return lambda point: show(point) if point["median"].get(f"{name}.count") else ""

    return {f"{name.upper()} {share}": only(_number(f"{name}.{share}", seconds)) for share in PERCENTILES}


def _named(latency: str) -> str:
    name, _, share = latency.partition(".")
    return f"{name.upper()} {share}"


def _errors(point: Values) -> list[tuple[str, Values]]:
    last: dict[str, Values] = {}
    for run in point["repetitions"]:
        last |= run["requests"]["errors"]
    return list(last.items())


def _generator(made: Values) -> str:
    if "share_of_time" in made:
        return f"the load is made {made['where']} and took at most {made['share_of_time']:.1%} of the time from it"
    known = made.get("limits")
    if known is None:
        return f"the load is made by {made['where']}; its own limits were not measured (remote.calibrate=false)"
    return (
        f"the load is made by {made['where']}; here it can make at most {known['requests']:.0f} requests/s with "
        f"{known['clients']:.0f} clients, takes at most {known['events']:,.0f} events/s, and adds {seconds(known['added_p50'])} "
        f"(p99 {seconds(known['added_p99'])}) to a TTFT"
    )


def _most(points: Sequence[Values]) -> dict[str, float]:
    """The largest share of time that making the load took on any point, where it is made between steps."""
    shares = [point["generator"]["share_of_time"] for point in points if "share_of_time" in point["generator"]]
    return {"share_of_time": max(shares)} if shares else {}


def _pressed(point: Values) -> bool:
    """Whether the load came near what the generator can do."""
    known, median = point["generator"].get("limits"), point["median"]
    if known is None or not median:
        return False
    rates = ((median["throughput.requests"], known["requests"]), (median["throughput.output_tokens"], known["events"]))
    return any(rate > most / 2 for rate, most in rates)


def _equality(point: Values) -> str:
    found = point.get("equality")
    if found is None:
        return ""
    return found["verdict"] if found["against"] is None else f"{found['verdict']} (KL {found['kl_mean']:.1e})"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float) -> str:
    return f"{value:.3g}"


MEASURES: dict[str, Show] = {
    "output tokens/s": _number("throughput.output_tokens", lambda value: f"{value:,.1f}"),
    "output tokens/s, steady": _number("steady.output_tokens", lambda value: f"{value:,.1f}"),
    "total tokens/s": _number("throughput.total_tokens", lambda value: f"{value:,.1f}"),
    "requests/s": _number("throughput.requests", _rate),
    "requests/s asked": _number("offered", _rate),
    **{title: show for name in LATENCIES for title, show in _latency(name).items()},
    "goodput, requests/s": _number("goodput.requests", _rate),
    "goodput, share": _number("goodput.share", lambda value: f"{value:.0%}"),
    "finished": _number("requests.finished", _count),
    "failed": lambda point: _number("requests.failed", _count)(point) if point["range"]["requests.failed"][1] else "",
    "sent late, p99": _number("late.p99", seconds),
    "prompt tokens cached": _number("tokens.cached", _count),
    "preempted": lambda point: _preempted(point),
    "answers": _equality,
}


def _preempted(point: Values) -> str:
    keys = ("engine.preemptions_recompute", "engine.preemptions_swap")
    return _count(sum(point["median"][key] for key in keys)) if all(key in point["median"] for key in keys) else ""
