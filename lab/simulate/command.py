"""`turnout simulate`: compose, simulate each composition, show them side by side."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.compose.plugins import PluginError, Plugins, options_of
from turnout.core.types import ContractError
from turnout.lab.simulate import capacity
from turnout.lab.simulate.config import LATENCIES, SLOTS, WORKLOADS, SimulateConfig
from turnout.lab.simulate.loop import OnProgress, Simulation
from turnout.lab.simulate.points import Point, expand
from turnout.lab.simulate.record import SimulationRecord
from turnout.server.cli.arguments import ordered
from turnout.server.cli.composing import config_dirs, installed, searchpath, show
from turnout.server.cli.overrides import MANY, Usage, checked, try_composing, vet
from turnout.server.cli.progress import complain

if TYPE_CHECKING:
    from omegaconf import DictConfig

Make = Callable[[], SimulateConfig]  # components have state: each simulation gets new ones
Values = dict[str, Any]


def run(args: list[str]) -> int:
    """Exit code 0: done; 1: a policy broke its contract. Raises Usage when the command, the configuration or a trace is
    wrong."""
    found = installed()
    args, folders = config_dirs(ordered([arg for arg in args if arg not in MANY], "simulate", found))
    places = searchpath(found, folders)
    flags = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    points = expand(args[:flags], found)
    if args[flags:]:
        if len(points) > 1:
            raise Usage(f"{args[flags]} shows one composition; the comma lists make {len(points)}")
        show("simulate", [*places, *checked(points[0].overrides, found)], args[flags:])
        return 0
    try:
        makes = [_maker(point, places, found) for point in points]
        config = makes[0]()
        _check_outputs(config)
        results = []
        with _little_garbage():
            for number, (make, point) in enumerate(zip(makes, points, strict=True), 1):
                results.append({"point": point.varied} | _simulated(make, found, _reporter(number, points)))
    except (ValueError, PluginError) as error:
        raise Usage(str(error)) from error
    except ContractError as error:
        complain(error)
        return 1
    except KeyboardInterrupt:
        return 130
    _publish(config, points, results)
    return 0


def _maker(point: Point, places: list[str], found: Plugins) -> Make:
    """Compose a point now; make its objects whenever they are wanted. Raises Usage, and what the options raise."""
    from omegaconf import OmegaConf

    composed: DictConfig = try_composing("simulate", [*places, *checked(point.overrides, found)], found)
    vet(composed, found)

    def make() -> SimulateConfig:
        config = OmegaConf.to_object(composed)
        assert isinstance(config, SimulateConfig)
        return config

    make()
    return make


def _simulated(make: Make, found: Plugins, on_progress: OnProgress) -> Values:
    """One composition, at its rate or at the highest that keeps the bounds."""

    def simulate(factor: float = 1.0, allowed: Mapping[str, int] | None = None) -> tuple[Simulation, SimulationRecord]:
        config = make()
        if rate is not None:
            config.workload.rate = rate
        simulation = Simulation(config, found.manager, factor, allowed)
        return simulation, simulation.run(on_progress)

    rate: float | None = None
    simulation, record = simulate()
    asked: Values = {}
    config = simulation.config
    if config.capacity.bounds:
        offered = record.offered
        if offered is None:  # clients that ask when answered: from now on at the rate that came of it
            rate = offered = record.num_finished / record.seconds
            simulation, record = simulate()
        base = offered
        search = capacity.search(
            lambda wanted, allowed: simulate(wanted / base, allowed)[1], record, base, config.capacity.precision
        )
        record, asked = search.record, {"capacity": capacity.describe(search)}
    return _described(simulation, found) | record.summary() | asked


def _described(simulation: Simulation, found: Plugins) -> Values:
    """What was simulated."""
    config, info = simulation.config, simulation.info
    parts: Values = {}
    for slot in SLOTS:
        component = getattr(config, slot)
        choice = next(c for c in found.choices.values() if c.slot == slot and c.component is type(component))
        parts[slot] = {"name": choice.name, "options": options_of(component), "package": choice.package}
    for group, choices in (("workload", WORKLOADS), ("latency", LATENCIES)):
        name = next(name for name, kind in choices.items() if kind is type(getattr(config, group)))
        parts[group] = {"name": name, "options": options_of(getattr(config, group))}
    return {
        "composition": parts | {"limits": options_of(config.limits)},
        "num_blocks": info.num_blocks,
        "max_model_len": info.max_model_len,
        "notes": [*config.latency.assumptions(), *info.notes, *config.workload.notes()],
    }


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Collect rarely: a step makes thousands of short-lived objects, and none of them refers to itself."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _reporter(number: int, points: list[Point]) -> OnProgress:
    """Shows how far it is, on a terminal."""

    def on_progress(finished: int, seconds: float) -> None:
        if sys.stderr.isatty():
            name = points[number - 1].name
            line = f"[{number}/{len(points)}] {name}: {finished:,} requests, {seconds:,.0f} s simulated"
            print(f"\r\x1b[K{line}", end="\r", file=sys.stderr, flush=True)

    return on_progress


def _check_outputs(config: SimulateConfig) -> None:
    """Raise ValueError now for what could not be written hours later."""
    for key in ("out", "plot"):
        path = getattr(config, key)
        if path is not None and not Path(path).parent.is_dir():
            raise ValueError(f"{key}={path}: there is no folder {Path(path).parent}")
    if config.plot is not None:
        from turnout.lab.simulate.plots import check

        check(config.plot)


def _publish(config: SimulateConfig, points: list[Point], results: list[Values]) -> None:
    from rich.console import Console

    from turnout.lab.simulate.report import table

    console = Console(width=None if sys.stdout.isatty() else 200)
    names = [point.name or f"scheduler={results[0]['composition']['scheduler']['name']}" for point in points]
    console.print(table(names, results))
    notes = dict.fromkeys(note for result in results for note in result["notes"])
    refusals = dict.fromkeys(why for result in results if (why := result["requests"]["first_refusal"]))
    for note in (*notes, *(f"refused, for example: {why}" for why in refusals)):
        console.print(f"· {note}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if config.out is not None:
        Path(config.out).write_text(json.dumps({"turnout": version("turnout"), "points": results}, indent=1) + "\n")
        console.print(f"{config.out} has all numbers", highlight=False, soft_wrap=True)
    if config.plot is not None:
        from turnout.lab.simulate.plots import draw

        draw(names, results, config.plot)
        console.print(f"{config.plot} shows them", highlight=False, soft_wrap=True)
