"""`turnout COMMAND --help`: every key of the composition with its default, type and meaning, in groups. It runs nothing."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import groupby

from turnout.compose.plugins import SLOTS, Plugins
from turnout.server.cli.keys import Key, keys_of
from turnout.server.cli.overrides import try_composing

INDENT, ABOUT = 2, 46  # columns at which a key and its meaning begin
FOOT = """\
A key is set with KEY=VALUE, or as a flag: server.port=9000 and --port 9000 are the same.
  experiment=NAME      a preset of many keys; --config-dir FOLDER adds your own
  --cfg job            show what was composed, and do nothing
`turnout plugins` shows the options of every choice; SLOT=NAME --help those of one."""


def show_help(command: str, overrides: Sequence[str], found: Plugins) -> None:
    """Print it for what the overrides compose. Raises Usage for overrides that compose nothing."""
    from omegaconf import OmegaConf

    composed = try_composing(command, list(overrides), found)
    about = " ".join((OmegaConf.get_type(composed).__doc__ or "").split()).partition(" Raises ")[0]
    width = max(shutil.get_terminal_size((120, 24)).columns, 80)
    prompt = '"PROMPT" ' if command == "generate" else ""
    print(f"turnout {command} {prompt}[KEY=VALUE ...]\n\n{about}")
    keys = list(keys_of(composed))
    slots = [slot for slot in map(str, composed) if slot in SLOTS]
    groups = {group: list(own) for group, own in groupby(keys, key=lambda key: key.name.rpartition(".")[0])}
    flat = [key for key in keys if "." not in key.name]
    print("\n" + "\n".join(_line(key, width) for key in flat))
    for slot in slots:
        kind = OmegaConf.get_type(composed[slot])
        mine = [c for c in found.choices.values() if c.slot == slot]
        name = next((choice.name for choice in mine if choice.component is kind), "")
        others = ", ".join(sorted(choice.name for choice in mine if choice.name != name))
        print("\n" + _wrapped(f"{slot}={name}", f"or {others}" if others else "", width))
        for key in groups.get(slot, []):
            print(_line(key, width))
    for group, own in groups.items():
        if group and group not in slots:
            print(f"\n{group}")
            print("\n".join(_line(key, width) for key in own))
    print(f"\n{FOOT}")


def _line(key: Key, width: int) -> str:
    default = "null" if key.default is None else str(key.default).lower() if key.kind == "bool" else key.default
    kind = key.kind.replace(" | None", "").strip("'\"")
    return _wrapped(
        " " * INDENT + f"{key.name}={default}", f"{key.about} ({kind})" if key.about else f"({kind})", width
    )


def _wrapped(left: str, right: str, width: int) -> str:
    """Two columns; what is too long on the left has a line of its own."""
    if not right:
        return left
    lines = textwrap.wrap(right, max(width - ABOUT, 30))
    first = left.ljust(ABOUT) if len(left) < ABOUT - 1 else f"{left}\n{' ' * ABOUT}"
    return first + f"\n{' ' * ABOUT}".join(lines)
