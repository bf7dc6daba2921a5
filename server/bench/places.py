"""Where presets are looked for: in plugin packages, and in the folders that --config-dir names."""

from __future__ import annotations

from pathlib import Path

from turnout.core.plugins import Plugins
from turnout.server.overrides import Usage, quoted

FLAGS = ("-cd", "--config-dir")


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
