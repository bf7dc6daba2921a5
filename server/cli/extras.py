"""What a command needs installed beside the core, by the extras that the package itself states."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

from turnout.server.cli.overrides import Usage

NEEDS = {"serve": "serve", "generate": "serve", "chat": "serve"}  # command -> extra; those of the laboratory need lab


def check(command: str, extra: str) -> None:
    """Raises Usage with the way to install what `command` lacks."""
    if absent := missing(extra):
        raise Usage(
            f"turnout {command} needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed: "
            f"pip install 'turnout[{extra}]'"
        )


def missing(extra: str) -> list[str]:
    """Distributions of an extra, and of the extras it is made of, that are not installed."""
    absent = []
    for line in requires("turnout") or ():
        needed, _, where = line.partition(";")
        if not re.search(rf"extra == ['\"]{extra}['\"]", where):
            continue
        if own := re.match(r"turnout\[([\w,-]+)\]", needed):
            absent += [name for other in own.group(1).split(",") for name in missing(other)]
        elif (found := re.match(r"[\w.-]+", needed)) and not _installed(found.group()):
            absent.append(found.group())
    return sorted(set(absent))


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False
