"""What every command that composes an engine begins with: plugins, places of presets, and flags that only show."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from turnout.core import plugins
from turnout.core.plugins import Plugins
from turnout.server.cli.overrides import Usage, quoted

FLAGS = ("-cd", "--config-dir")


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


def show(command: str, overrides: Sequence[str], flags: Sequence[str]) -> None:
    """Let Hydra show what its flags ask for: --help, --cfg job. Raises Usage for flags that show nothing: nothing would
    happen, and look like success."""
    import hydra

    idle: list[object] = []
    sys.argv = [f"turnout {command}", *overrides, *flags]
    try:
        hydra.main(version_base=None, config_path="pkg://turnout.conf", config_name=command)(idle.append)()
    except ValueError as error:  # flags that do not go together
        raise Usage(str(error)) from error
    if idle:
        raise Usage(
            f"{' '.join(flags)}: nothing was done, since turnout {command} takes flags that show: --help, --cfg job"
        )
