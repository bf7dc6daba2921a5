"""What every command that composes an engine begins with: plugins, places of presets, and flags that only show."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnout.compose import plugins
from turnout.compose.plugins import Plugins
from turnout.server.cli.arguments import HELP
from turnout.server.cli.help import show_help
from turnout.server.cli.overrides import Usage
from turnout.server.cli.texts import quoted

if TYPE_CHECKING:
    from omegaconf import DictConfig

FLAGS = ("-cd", "--config-dir")
SETTINGS = (  # Hydra configures no logging, changes no directory, and writes nothing
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.job.name=turnout",
    "hydra.job.chdir=false",
)


def installed() -> Plugins:
    """Every plugin; those that can't be used are warned of."""
    found = plugins.load()
    for name, why in found.faults.items():
        logging.getLogger("turnout").warning("plugin %s is skipped: %s", name, why)
    return found


def config_dirs(args: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without --config-dir, and its folders. Raises Usage for a folder that is not there."""
    kept: list[str] = []
    folders: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if flag not in FLAGS:
            kept.append(arg)
            continue
        folder = value if equals else next(rest, "")
        if not Path(folder).is_dir():
            raise Usage(f"{flag} {folder}: there is no such folder")
        folders.append(folder)
    return kept, folders


def searchpath(found: Plugins, folders: list[str]) -> list[str]:
    """The override that makes Hydra look there; none where there is nothing beside our own."""
    places = [f"file://{Path(folder).resolve()}" for folder in folders]
    places += [f"pkg://{package}" for package in found.presets]
    return [f"hydra.searchpath=[{','.join(map(quoted, places))}]"] if places else []


def run_hydra(command: str, args: Sequence[str], task: Callable[[DictConfig], None]) -> None:
    """Give `task` what the arguments compose, or let Hydra do what its flags among them ask for."""
    import hydra

    sys.argv = [f"turnout {command}", *SETTINGS, *args]
    hydra.main(version_base=None, config_path="pkg://turnout.conf", config_name=command)(task)()


def show(command: str, overrides: Sequence[str], flags: Sequence[str]) -> None:
    """Show what flags ask for: --help, and --cfg job by Hydra. Raises Usage for flags that show nothing: nothing would
    happen, and look like success."""
    if set(flags) & set(HELP):
        show_help(command, overrides, plugins.load())
        return
    idle: list[object] = []
    try:
        run_hydra(command, [*overrides, *flags], idle.append)
    except ValueError as error:  # flags that do not go together
        raise Usage(str(error)) from error
    if idle:
        raise Usage(
            f"{' '.join(flags)}: nothing was done, since turnout {command} takes flags that show: --help, --cfg job"
        )
