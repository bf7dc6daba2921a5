"""`turnout ab`: compose both sides, compare them, say what was found."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnout.compose.plugins import PluginError, Plugins
from turnout.core.types import ContractError, ModelError
from turnout.lab.ab.asked import Line, read
from turnout.lab.ab.config import AbConfig
from turnout.server.cli.arguments import ordered
from turnout.server.cli.composing import config_dirs, installed, searchpath, show
from turnout.server.cli.overrides import Usage, checked
from turnout.server.cli.progress import complain

if TYPE_CHECKING:
    from turnout.lab.ab.opening import Composed
    from turnout.lab.ab.result import Values

USAGE, FAILED, INTERRUPTED = 64, 70, 130  # exit codes that no verdict has; the first two as sysexits.h has them


def run(args: list[str]) -> int:
    """Exit code 0: equivalent, 1: different, 2: not enough data; 64: the command is wrong, 70: a side failed."""
    from turnout.lab.compare.sides import SideError

    try:
        found = installed()
        rest, folders = config_dirs(ordered(args, "ab", found))
        line, places = read(rest), searchpath(found, folders)
        if line.flags:
            return _show(line, places, found)
        from turnout.lab.ab.opening import composed

        config, sides = composed(line, places, found)
        check_outputs(config)
        return _compare(config, sides, args)
    except (Usage, PluginError, ModelError, ValueError) as error:
        complain(error)
        return USAGE
    except (SideError, ContractError, RuntimeError, OSError) as error:
        complain(error)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:  # noqa: BLE001  Python would end with 1, which is a verdict
        traceback.print_exc()
        return FAILED


def _show(line: Line, places: list[str], found: Plugins) -> int:
    try:
        show("ab", [*places, *checked([*line.common, *line.own], found)], line.flags)
    except SystemExit as end:
        return USAGE if end.code else 0
    return 0


def check_outputs(config: AbConfig) -> None:
    """Raise ValueError now for what could not be written in the end."""
    for key in ("out", "html"):
        path = getattr(config, key)
        if path is not None and not Path(path).parent.is_dir():
            raise ValueError(f"{key}={path}: there is no folder {Path(path).parent}")


def _compare(config: AbConfig, sides: Sequence[Composed], args: Sequence[str]) -> int:
    from turnout.lab.ab.opening import opened
    from turnout.lab.ab.result import describe
    from turnout.lab.compare.run import compare
    from turnout.lab.compare.speed import race
    from turnout.server.cli.progress import Progress

    loading = Progress()
    try:
        with opened(config, sides, loading) as ready:
            found = compare(ready.a, ready.others, ready.items, config.settings, ready.text.decode, loading)
            races = race(ready.a, ready.others, ready.items, config.max_tokens, config.rounds, loading)
            result = describe(config, args, ready, found, races)
    finally:
        loading.close()
    _publish(config, result)
    return int(result["exit_code"])


def _publish(config: AbConfig, result: Values) -> None:
    from rich.console import Console

    from turnout.lab.ab.page import page
    from turnout.lab.ab.report import show

    console = Console(width=None if sys.stdout.isatty() else 130)
    show(console, result)
    if config.out is not None:
        Path(config.out).write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"{config.out} has all numbers", highlight=False, soft_wrap=True, markup=False)
    if config.html is not None:
        Path(config.html).write_text(page(result), encoding="utf-8")
        console.print(f"{config.html} shows them", highlight=False, soft_wrap=True, markup=False)
