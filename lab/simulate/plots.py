"""Pictures of results: queue and block use over time, and latency against load where several rates were simulated."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Mapping[str, Any]
KINDS = (".svg", ".png", ".pdf")
LOAD = ("workload.rate", "workload.speed")  # what a load is varied by


def check(path: str) -> None:
    """Raise ValueError when no picture could be drawn."""
    if Path(path).suffix not in KINDS:
        raise ValueError(f"plot={path}: a picture is a file that ends in {', '.join(KINDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"plot={path} needs matplotlib: pip install 'turnout[plot]', or leave plot out")


def draw(names: Sequence[str], results: Sequence[Values], path: str) -> None:
    """One file, a panel for each question."""
    from matplotlib.figure import Figure

    loads = _loads(results)
    figure = Figure(figsize=(10, 8 if loads else 4.5), layout="constrained")
    panels = figure.subplots(2 if loads else 1, 2, squeeze=False)
    for name, result in zip(names, results, strict=True):
        line, blocks = result["timeline"], result["cache"]["blocks"]
        panels[0][0].plot(line["time"], line["waiting"], label=name, linewidth=1)
        panels[0][1].plot(line["time"], [100 * used / blocks for used in line["blocks_used"]], label=name, linewidth=1)
    _name(panels[0][0], "requests waiting", "seconds simulated", "")
    _name(panels[0][1], "blocks in use", "seconds simulated", "%")
    panels[0][1].set_ylim(bottom=0)
    for panel, measure, title in zip(panels[1] if loads else (), ("ttft", "itl"), ("TTFT", "ITL"), strict=False):
        for number, (name, points) in enumerate(loads.items()):
            rates = [result["offered"] for result in points]
            for share, style in (("p50", ":"), ("p99", "-")):
                values = [result[measure][share] for result in points]
                label = f"{name} {share}".strip()
                panel.plot(rates, values, style, color=f"C{number % 10}", marker="o", markersize=3, label=label)
        _name(panel, title, "requests per second asked", "seconds")
        panel.set_yscale("log")
    for panel in figure.axes:
        if len(panel.lines) > 1:
            panel.legend(fontsize="x-small")
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def _loads(results: Sequence[Values]) -> dict[str, list[Values]]:
    """Results that differ in their load alone, in order, by what else they are; empty: the load was not varied."""
    groups: dict[str, list[Values]] = {}
    for result in results:
        others = " ".join(f"{key}={value}" for key, value in result["point"].items() if key not in LOAD)
        if result["offered"] and any(key in LOAD for key in result["point"]):
            groups.setdefault(others, []).append(result)
    found = {name: sorted(points, key=lambda result: result["offered"]) for name, points in groups.items()}
    return {name: points for name, points in found.items() if len(points) > 1}


def _name(panel: Axes, title: str, x: str, y: str) -> None:
    panel.set_title(title)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
