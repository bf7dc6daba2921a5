"""Pictures of a benchmark: throughput against latency with the front, the percentiles, and latency against load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Mapping[str, Any]
LOAD = ("concurrency", "workload.rate", "workload.speed")  # what a load is varied by


def draw(names: Sequence[str], points: Sequence[Values], latency: str, path: str) -> None:
    """One file, a panel for each question."""
    from matplotlib.figure import Figure

    shown = [(name, point) for name, point in zip(names, points, strict=True) if point["median"]]
    loads = _loads(points)
    figure = Figure(figsize=(10, 8 if loads else 4.5), layout="constrained")
    panels = figure.subplots(2 if loads else 1, 2, squeeze=False)
    _front(panels[0][0], shown, latency)
    _percentiles(panels[0][1], shown)
    key, lines = loads or ("", {})
    for panel, measure in zip(panels[1] if loads else (), ("ttft", "itl"), strict=False):
        for name, found in lines.items():
            for share, style in (("p50", ":"), ("p99", "-")):
                values = [point["median"][f"{measure}.{share}"] for _, point in found]
                panel.plot(
                    [x for x, _ in found], values, style, marker="o", markersize=3, label=f"{name} {share}".strip()
                )
        _name(panel, measure.upper(), key, "seconds")
    for panel in figure.axes:
        if len(panel.get_legend_handles_labels()[0]) > 1:
            panel.legend(fontsize="x-small")
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def _front(panel: Axes, shown: Sequence[tuple[str, Values]], latency: str) -> None:
    key = "throughput.output_tokens"
    for name, point in shown:
        x, y, best = point["median"][latency], point["median"][key], point["pareto"]["front"]
        across, up = ([[abs(value - at)] for value in point["range"][k]] for k, at in ((latency, x), (key, y)))
        panel.errorbar(
            x,
            y,
            xerr=across,
            yerr=up,
            fmt="*" if best else "o",
            markersize=9 if best else 5,
            elinewidth=0.8,
            label=name,
        )
    best = sorted((p["median"][latency], p["median"][key]) for _, p in shown if p["pareto"]["front"])
    if len(best) > 1:
        panel.plot([x for x, _ in best], [y for _, y in best], linewidth=0.8, color="gray", label="Pareto front")
    name, _, share = latency.partition(".")
    _name(panel, "throughput against latency", f"{name.upper()} {share}, seconds", "output tokens/s")


def _percentiles(panel: Axes, shown: Sequence[tuple[str, Values]]) -> None:
    shares = ("p50", "p90", "p95", "p99")
    for number, (name, point) in enumerate(shown):
        for start, measure in ((0, "ttft"), (len(shares), "itl")):
            values = [point["median"][f"{measure}.{share}"] for share in shares]
            places, label = range(start, start + len(shares)), "" if start else name
            panel.plot(places, values, marker="o", markersize=3, color=f"C{number % 10}", label=label)
    names = [f"{measure} {share}" for measure in ("TTFT", "ITL") for share in shares]
    panel.set_xticks(range(len(names)), names, fontsize=7)
    panel.set_yscale("log")
    _name(panel, "latency", "", "seconds")


def _loads(points: Sequence[Values]) -> tuple[str, dict[str, list[tuple[float, Values]]]] | None:
    """The key the load was varied by, and by what else the points are: (load, point) in order. None: it was not varied."""
    key = next((key for key in LOAD if any(key in point["point"] for point in points)), None)
    if key is None:
        return None
    groups: dict[str, list[tuple[float, Values]]] = {}
    for point in points:
        if key in point["point"] and point["median"] and point["point"][key] != "null":
            others = " ".join(f"{name}={value}" for name, value in point["point"].items() if name != key)
            groups.setdefault(others, []).append((float(point["point"][key]), point))
    found = {name: sorted(of, key=lambda pair: pair[0]) for name, of in groups.items() if len(of) > 1}
    return (key, found) if found else None


def _name(panel: Axes, title: str, x: str, y: str) -> None:
    panel.set_title(title)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
