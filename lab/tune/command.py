"""`turnout tune`: check everything, walk, write the composition and the evidence."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.compose.plugins import PluginError, Plugins
from turnout.core.types import ContractError, ModelError
from turnout.lab.simulate.points import expand
from turnout.lab.tune.config import TuneConfig
from turnout.server.cli.arguments import ordered
from turnout.server.cli.composing import config_dirs, installed, searchpath, show
from turnout.server.cli.overrides import MANY, Usage, checked, objects, try_composing
from turnout.server.cli.progress import complain

if TYPE_CHECKING:
    from turnout.lab.tune.trials import Make
    from turnout.lab.tune.walk import Compose


def run(args: list[str]) -> int:
    """Exit code 0: done, whether or not something better was found; 1: an engine failed, or the result's answers are different;
    130: interrupted. Raises Usage when the command, the configuration or the workload is wrong."""
    found = installed()
    if any(arg in MANY for arg in args):
        raise Usage("turnout tune starts from one composition and varies it itself; turnout bench --multirun sweeps")
    args, folders = config_dirs(ordered(args, "tune", found))
    flags = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    points = expand(args[:flags], found)
    if len(points) > 1:
        raise Usage(
            f"the comma lists make {len(points)} compositions; turnout tune starts from one and varies it itself"
        )
    if args[flags:]:
        show("tune", [*searchpath(found, folders), *checked(points[0].overrides, found)], args[flags:])
        return 0
    overrides = dict(override.split("=", 1) for override in checked(points[0].overrides, found))

    def compose(changed: Mapping[str, str]) -> Make:
        return _maker(changed, found, folders)

    try:
        config = compose(overrides)()
        _check(config)
        return _tune(overrides, config, found, compose)
    except (ModelError, PluginError, ValueError) as error:
        raise Usage(str(error)) from error
    except (ContractError, RuntimeError, OSError) as error:
        complain(error)
        return 1
    except KeyboardInterrupt:
        return 130


def _tune(overrides: Mapping[str, str], config: TuneConfig, found: Plugins, compose: Compose) -> int:
    from rich.console import Console

    from turnout.lab.bench.environment import environment
    from turnout.lab.bench.equality import EqualityJudge
    from turnout.lab.tune.composition import command_of, preset
    from turnout.lab.tune.report import evidence, markdown, show
    from turnout.lab.tune.trials import Trials
    from turnout.lab.tune.walk import Tuner
    from turnout.server.cli.progress import Progress

    if config.threads is not None:
        import torch

        torch.set_num_threads(config.threads)
    where = environment()
    with Progress(None) as progress:
        trials, judge = Trials(found.manager, progress), EqualityJudge(config.equality)
        walk = Tuner(overrides, compose, found, trials, judge, progress).run()
    result: dict[str, Any] = {"environment": where} | evidence(walk, config)
    console = Console(width=None if sys.stdout.isatty() else 160)
    show(console, result)
    for path, text in (
        (config.out, json.dumps(result, indent=1, default=str) + "\n"),
        (config.markdown, markdown(result)),
    ):
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
            console.print(f"{path} has the evidence", highlight=False, soft_wrap=True, markup=False)
    if result["answers"] == "different":
        console.print("nothing is written: the result's answers are not the baseline's", markup=False)
        return 1
    file = Path(config.composition)
    file.parent.mkdir(parents=True, exist_ok=True)
    tuned = compose(walk.overrides)()
    file.write_text(preset(tuned, found, ["by turnout tune", *result["summary"]]), encoding="utf-8")
    console.print(
        f"{file} has the composition: {command_of(config.composition)}", highlight=False, soft_wrap=True, markup=False
    )
    return 0


def _maker(overrides: Mapping[str, str], found: Plugins, folders: list[str]) -> Make:
    """Compose now, make objects whenever they are wanted. Raises Usage, and what the options raise."""
    given = [*searchpath(found, folders), *(f"{key}={value}" for key, value in overrides.items())]
    composed = try_composing("tune", given, found)

    def make() -> TuneConfig:
        config = objects(composed, found)
        assert isinstance(config, TuneConfig)
        return config

    make()
    return make


def _check(config: TuneConfig) -> None:
    """Raise ValueError now for what would fail in the end."""
    from turnout.lab.tune.variables import check

    check(config.variables)
    for key in ("out", "markdown"):
        path = getattr(config, key)
        if path is not None and not Path(path).parent.is_dir():
            raise ValueError(f"{key}={path}: there is no folder {Path(path).parent}")
    file = Path(config.composition)
    if file.suffix != ".yaml":
        raise ValueError(f"composition={config.composition}: the file must end in .yaml, as Hydra's presets do")
