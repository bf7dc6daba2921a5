"""Results side by side: one table in the terminal, one JSON file. It computes no result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Values = Mapping[str, Any]
WIDE = 6  # compositions that stand beside each other; more stand below each other
SHORT = ("rate", "TTFT p99", "ITL p99", "E2E p99", "output tokens/s", "goodput", "cache hits", "preempted", "fairness")


def table(names: Sequence[str], results: Sequence[Values]) -> Table:
    """One table: a column each for a few compositions, a row each for many."""
    from rich.table import Table

    lines = [(title, [show(result) for result in results]) for title, show in MEASURES.items()]
    lines = [(title, cells) for title, cells in lines if any(cells)]
    made = Table(title_justify="left", header_style="bold")
    if len(results) <= WIDE:
        made.add_column("")
        for name in names:
            made.add_column(name, justify="right", overflow="fold")
        for title, cells in lines:
            made.add_row(title, *cells)
        return made
    made.add_column("composition", no_wrap=True)
    lines = [line for line in lines if line[0].startswith(SHORT)]
    for title, _ in lines:
        made.add_column(title, justify="right")
    for i, name in enumerate(names):
        made.add_row(name, *(cells[i] for _, cells in lines))
    return made


def seconds(value: float) -> str:
    """With three digits that mean something."""
    return f"{value * 1e3:.3g} ms" if value < 1.0 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _spread(name: str) -> dict[str, Callable[[Values], str]]:
    def percentiles(result: Values) -> str:
        return " / ".join(seconds(result[name][p]) for p in ("p50", "p90", "p95"))

    title = name.upper()
    return {f"{title} p50 / p90 / p95": percentiles, f"{title} p99": lambda result: seconds(result[name]["p99"])}


def _requests(result: Values) -> str:
    counts = result["requests"]
    refused = f", {counts['refused']:,} refused" if counts["refused"] else ""
    return f"{counts['finished']:,}{refused}"


def _goodput(result: Values) -> str:
    good = result["goodput"]
    return f"{good['requests']:.3g}/s ({good['share']:.0%})"


def _preempted(result: Values) -> str:
    counts = result["preemptions"]
    return f"{counts['recompute']:,} / {counts['swap']:,}"


def _fairness(result: Values) -> str:
    fair = result["fairness"]
    if fair is None:
        return ""
    if fair["compared"] is None:
        return "nobody waited"
    return f"{fair['compared']['jain']:.3f} / {fair['compared']['largest_difference']:,}"


def _capacity(result: Values) -> str:
    found = result.get("capacity")
    if found is None:
        return ""
    if found["rate"] is None:
        return f"none, not even {found['fails_at']:.3g}/s"
    return f"{found['rate']:.4g}/s" if found["fails_at"] else f"above {found['rate']:.4g}/s"


MEASURES: dict[str, Callable[[Values], str]] = {
    "highest rate under the bounds": _capacity,
    "requests": _requests,
    "rate asked": lambda r: f"{r['offered']:.4g}/s" if r["offered"] else "as answered",
    "rate served": lambda r: f"{r['throughput']['requests']:.4g}/s",
    **_spread("ttft"),
    **_spread("itl"),
    **_spread("tpot"),
    **_spread("e2e"),
    "output tokens/s": lambda r: f"{r['throughput']['output_tokens']:,.0f}",
    "goodput": _goodput,
    "cache hits": lambda r: f"{r['cache']['hit_rate']:.1%}",
    "preempted: recompute / swap": _preempted,
    "recomputed tokens": lambda r: f"{r['preemptions']['recomputed_tokens']:,}",
    "fairness: Jain / largest difference": _fairness,
    "running, mean / most": lambda r: f"{r['steps']['mean_running']:.0f} / {r['steps']['most_running']}",
    "waiting, most": lambda r: f"{r['steps']['most_waiting']:,}",
    "steps": lambda r: f"{r['steps']['count']:,}",
    "time simulated": lambda r: seconds(r["seconds"]),
    "engine per step: schedule / account": lambda r: (
        f"{r['wall']['schedule_us']:.0f} / {r['wall']['account_us']:.0f} µs"
    ),
    "wall time": lambda r: seconds(r["wall"]["seconds"]),
}
