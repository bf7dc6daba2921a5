"""What can be changed, one thing at a time, and to which values. It runs nothing.

The order is that of the guides: what is scheduled, in which portions, under which budgets, then memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from turnout.compose.config import Config, chosen
from turnout.compose.plugins import Plugins

FACTORS = (0.25, 0.5, 2.0, 4.0)
NAMES = (
    "scheduler",
    "scheduler.chunk",
    "limits.max_num_batched_tokens",
    "limits.max_num_seqs",
    "blocks",
    "preemption",
    "blocks.block_size",
)
UNSEEN = ("blocks.block_size",)  # changes the kernels' own speed, which a law of step times can't know
BLOCK_SIZES = (8, 16, 32, 64)


class Change(NamedTuple):
    """One value of one variable."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def check(names: list[str]) -> list[str]:
    """The variables to go through. Raises ValueError for a name that is none."""
    for name in names:
        if name not in NAMES:
            raise ValueError(f"variables: there is no {name!r}; what can be changed is {', '.join(NAMES)}")
    return names or list(NAMES)


def changes(name: str, config: Config, found: Plugins) -> Iterator[Change]:
    """Every other value of a variable that is worth a try from this composition."""
    now = chosen(config, found)
    if name in ("scheduler", "blocks", "preemption"):
        yield from (Change(name, other) for other in found.names(name) if other != now[name])
        return
    section, _, option = name.partition(".")
    component = getattr(config, section)
    if option not in {field.name for field in dataclasses.fields(component)}:
        return  # this scheduler has no chunk
    value = getattr(component, option)
    if name == "blocks.block_size":
        yield from (Change(name, str(size)) for size in BLOCK_SIZES if size != value)
        return
    yield from (Change(name, str(new)) for factor in FACTORS if (new := int(value * factor)) >= 1)


def merged(overrides: Mapping[str, str], change: Change) -> dict[str, str]:
    """The overrides with one changed. Another choice in a slot takes none of the options of the last one along."""
    kept = {
        key: value
        for key, value in overrides.items()
        if key != change.key and not ("." not in change.key and key.startswith(f"{change.key}."))
    }
    if change.key == "blocks" and "blocks.num_blocks" in overrides:  # every block manager has it: memory is no variable
        kept["blocks.num_blocks"] = overrides["blocks.num_blocks"]
    if change.key == "blocks" and "blocks.block_size" in overrides:
        kept["blocks.block_size"] = overrides["blocks.block_size"]
    return kept | {change.key: change.value}
