"""`turnout bench`: compose every point, measure one after the other, show them side by side."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from turnout.compose.plugins import SLOTS, PluginError, Plugins
from turnout.core.types import ContractError, ModelError
from turnout.lab.bench.config import BenchConfig
from turnout.lab.simulate.points import Point, expand
from turnout.server.cli.arguments import ordered
from turnout.server.cli.composing import config_dirs, installed, searchpath, show
from turnout.server.cli.overrides import MANY, Usage, checked, objects, try_composing
from turnout.server.cli.progress import complain

if TYPE_CHECKING:
    from turnout.lab.bench.equality import EqualityJudge
    from turnout.lab.bench.measure import Calibration, OnProgress

Values = dict[str, Any]
ENGINE = (*SLOTS, "model", "dtype", "device", "limits", "experiment")  # keys that compose an engine


class PlannedPoint(NamedTuple):
    """One point, composed and checked. `make` gives new objects each time: components have state."""

    point: Point
    make: Callable[[], BenchConfig]
    folders: list[str]  # where presets of --config-dir are


def run(args: list[str]) -> int:
    """Exit code 0: done; 1: every request of a point failed, or an engine did; 130: interrupted, after showing what there was.
    Raises Usage when the command, the configuration or a trace is wrong."""
    found = installed()
    args, folders = config_dirs(ordered([arg for arg in args if arg not in MANY], "bench", found))
    flags = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    points = expand(args[:flags], found)
    if args[flags:]:
        if len(points) > 1:
            raise Usage(f"{args[flags]} shows one composition; the comma lists make {len(points)}")
        show("bench", _overrides(points[0], found, folders), args[flags:])
        return 0
    try:
        planned = [PlannedPoint(point, _maker(point, found, folders), folders) for point in points]
        config = planned[0].make()
        _check_outputs(config)
    except (ValueError, PluginError) as error:
        raise Usage(str(error)) from error
    return _measure_all(planned, config)


def _measure_all(planned: list[PlannedPoint], config: BenchConfig) -> int:
    from turnout.lab.bench.environment import environment
    from turnout.lab.bench.measure import Calibration
    from turnout.server.cli.progress import Progress

    if config.threads is not None:
        import torch

        torch.set_num_threads(config.threads)
    where, results, judge, code = environment(), list[Values](), _judge(config), 0
    calibration = Calibration()
    try:
        for number, one in enumerate(planned, 1):
            head = f"[{number}/{len(planned)}] {one.point.name}" if len(planned) > 1 else ""
            with Progress(getattr(one.make().workload, "num_requests", None), head) as progress:
                results.append({"point": one.point.varied} | _measured(one, judge, calibration, progress))
            if results[-1]["interrupted"]:
                code = 130
                break
    except KeyboardInterrupt:
        code = 130
    except (ModelError, PluginError, ValueError) as error:
        _publish(config, where, planned, results)
        raise Usage(str(error)) from error
    except (ContractError, RuntimeError, OSError) as error:
        complain(error)
        code = 1
    _publish(config, where, planned, results)
    failed = any(
        run["requests"]["sent"] and not run["requests"]["finished"] for r in results for run in r["repetitions"]
    )
    return code or int(failed)


def _measured(
    one: PlannedPoint, judge: EqualityJudge | None, calibration: Calibration, on_progress: OnProgress
) -> Values:
    """One point: an engine here, our server, or another's."""
    config = one.make()
    if config.over_http:
        return _over_http(one, config, calibration, on_progress)
    from turnout.compose.build import build_engine
    from turnout.lab.bench.measure import EngineSubject, measured

    engine = build_engine(config, lambda stage, share: on_progress(stage, 0))
    with _little_garbage():
        result = measured(EngineSubject(engine, config.temperature), config, on_progress)
    if judge is not None and not result["interrupted"]:
        on_progress("comparing answers", 0)
        try:
            result["equality"] = judge.of(engine, one.point.name or "the composition")
        except KeyboardInterrupt:
            result["interrupted"] = True
    return result


def _over_http(one: PlannedPoint, config: BenchConfig, calibration: Calibration, on_progress: OnProgress) -> Values:
    from contextlib import ExitStack

    from turnout.lab.bench.generator import Generator
    from turnout.lab.bench.measure import ServerSubject, measured
    from turnout.lab.bench.remote import look, serving

    with ExitStack() as stack:
        url = config.url
        if url is None:
            on_progress("starting the server", 0)
            engine = [override for override in one.point.overrides if _key(override) in ENGINE]
            flags = [word for folder in one.folders for word in ("--config-dir", folder)]
            url = stack.enter_context(serving([*engine, *flags], config.threads))
        served = look(url, config.remote)
        generator = stack.enter_context(Generator())
        known = calibration.of(generator, config, on_progress)
        return measured(ServerSubject(served, config, generator, known), config, on_progress)


def _judge(config: BenchConfig) -> EqualityJudge | None:
    if not config.ab:
        return None
    from turnout.lab.bench.equality import EqualityJudge

    return EqualityJudge(config.equality)


def _overrides(point: Point, found: Plugins, folders: list[str]) -> list[str]:
    return searchpath(found, folders) + checked(point.overrides, found)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").partition(".")[0]


def _maker(point: Point, found: Plugins, folders: list[str]) -> Callable[[], BenchConfig]:
    """Compose a point now. Raises Usage, and what the options raise."""
    composed = try_composing("bench", _overrides(point, found, folders), found)

    def make() -> BenchConfig:
        config = objects(composed, found)
        assert isinstance(config, BenchConfig)
        return config

    if make().url is not None:
        idle = sorted({override for override in point.overrides if _key(override) in ENGINE})
        if idle:
            raise Usage(
                f"{idle[0]} says how an engine is composed, but url names a server that runs already: leave one out"
            )
    return make


@contextmanager
def _little_garbage() -> Iterator[None]:
    """What is alive now is left alone by the collector: it stays to the end."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check_outputs(config: BenchConfig) -> None:
    """Raise ValueError now for what could not be written in the end."""
    for key in ("out", "markdown", "plot"):
        path = getattr(config, key)
        if path is not None and not Path(path).parent.is_dir():
            raise ValueError(f"{key}={path}: there is no folder {Path(path).parent}")
    if config.plot is not None:
        from turnout.lab.simulate.plots import check

        check(config.plot)


def _publish(config: BenchConfig, where: Values, planned: list[PlannedPoint], results: list[Values]) -> None:
    if not results or not any(result["repetitions"] for result in results):
        print("turnout: nothing was measured", file=sys.stderr)
        return
    from turnout.lab.bench.report import publish

    names = [one.point.name for one in planned[: len(results)]]
    publish(config, {"turnout": version("turnout"), "environment": where, "points": results}, names)
