"""A composition as a YAML file that any command takes as a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnout.compose.config import Config, to_container
from turnout.compose.plugins import SLOTS, Plugins


def preset(config: Config, found: Plugins, remarks: list[str]) -> str:
    """Every choice with all its options; memory that was sized automatically stays so."""
    from omegaconf import OmegaConf

    plain = to_container(config, found)
    defaults = [{f"override /{slot}": plain[slot]["name"]} for slot in SLOTS]
    values: dict[str, Any] = {"defaults": defaults}
    values |= {slot: plain[slot]["options"] for slot in SLOTS if plain[slot]["options"]}
    values |= {name: value for name, value in plain.items() if name not in SLOTS}
    return (
        "# @package _global_\n"
        + "".join(f"# {line}\n" for line in remarks)
        + OmegaConf.to_yaml(OmegaConf.create(values))
    )


def command_of(path: str) -> str:
    """How to use the file."""
    file = Path(path)
    if file.parent.name == "experiment":
        return f"turnout serve --config-dir {file.parent.parent} experiment={file.stem}"
    return f"put {path} into a folder named experiment: turnout serve --config-dir ITS_PARENT experiment={file.stem}"
