"""Command-line overrides before Hydra sees them: quoted where people forget to, refused where Hydra would puzzle them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

from turnout.core.plugins import SLOTS, Plugins

FREE_TEXT = ("model", "prompt", "system", "server.served_model_name", "server.api_key")  # quoted for Hydra where needed
MANY = ("-m", "--multirun")
WITH_VALUE = ("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir")


class Usage(Exception):
    """The command line is wrong; the message says how to right it."""


def in_order(args: list[str]) -> list[str]:
    """Overrides first, then Hydra's flags with their values: its parser takes them in no other order."""
    overrides: list[str] = []
    flags: list[str] = []
    for arg in args:
        value = bool(flags) and flags[-1] in WITH_VALUE
        (flags if arg.startswith("-") or value else overrides).append(arg)
    return overrides + flags


def is_override(arg: str) -> bool:
    """Whether an argument of `generate` is a Hydra override or flag rather than the prompt."""
    key = re.match(r"^[+~]{0,2}([A-Za-z_]\w*)[\w./@:]*=", arg)
    known = {
        *SLOTS,
        "model",
        "dtype",
        "device",
        "limits",
        "server",
        "sampling",
        "prompt",
        "chat",
        "experiment",
        "hydra",
    }
    return bool(key and key.group(1) in known) or bool(re.match(r"^(-[a-zA-Z]|--[a-z-]+)$", arg)) or arg.startswith("~")


def checked(args: list[str], found: Plugins) -> list[str]:
    """The overrides as Hydra should see them.

    Raises PluginError for a choice that can't be used, Usage for a value that must be quoted.
    """
    many = any(arg in MANY for arg in args)
    return [_checked(arg, found, many) for arg in args]


def _checked(arg: str, found: Plugins, many: bool) -> str:
    key, equals, value = arg.partition("=")
    slot = key.lstrip("+")
    if not equals or arg.startswith("-"):
        return arg
    if slot in SLOTS:
        for name in value.split(",") if many else [value]:
            if re.fullmatch(r"[\w-]+", name):
                found.get(slot, name)
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if slot in FREE_TEXT and not many and not re.fullmatch(r"[\w./:+-]+|'.*'|\".*\"", value):
        return f"{key}={quoted(value)}"
    with contextlib.suppress(HydraException):
        OverridesParser.create().parse_override(arg)
        return arg
    raise Usage(
        f"{arg!r} cannot be read as KEY=VALUE. A value with spaces or one of = , # @ {{ }} [ ] must be quoted for Hydra inside "
        f"the shell's own quotes: {_shell(f'{key}={quoted(value)}')}"
    )


def quoted(value: str) -> str:
    """`value` as a quoted string of Hydra's override grammar."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"


def _shell(text: str) -> str:
    return '"' + re.sub(r'(["$`\\])', r"\\\1", text) + '"'


def try_composing(command: str, overrides: list[str], found: Plugins) -> None:
    """Compose once before anything starts. Raises Usage naming what was wrong, the package, and what it takes."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    import turnout.server.config  # noqa: F401  stores the schemas

    GlobalHydra.instance().clear()
    with initialize_config_module("turnout.conf", version_base=None):
        try:
            compose(command, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            key, text = _reason(error)
            parent, _, _ = key.rpartition(".")
            kept = [o for o in overrides if not _sets(o, key)]
            with contextlib.suppress(HydraException, OmegaConfBaseException):
                node = OmegaConf.select(compose(command, kept), parent) if parent else compose(command, kept)
                raise Usage(f"{text}\n{_what_it_takes(node, parent, OmegaConf.get_type(node), found)}") from error
            raise Usage(text) from error
        finally:
            GlobalHydra.instance().clear()


def _sets(override: str, key: str) -> bool:
    return override.partition("=")[0].lstrip("+~") == key


def _what_it_takes(node: object, parent: str, kind: object, found: Plugins) -> str:
    """The options beside the wrong one."""
    names = ", ".join(f"{parent}.{name}" if parent else str(name) for name in node) if isinstance(node, Mapping) else ""
    for choice in found.choices.values():
        if choice.slot == parent and choice.component is kind:
            options = f"takes {names}" if names else "has no options"
            return f"{parent}={choice.name} of {choice.package} {choice.version} {options}; `turnout plugins` shows all"
    return f"There are: {names}"


def _reason(error: BaseException) -> tuple[str, str]:
    """The key, and Hydra's and OmegaConf's words without the hints that lead nowhere on a typed configuration."""
    texts = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        texts.append(str(error))
    key = re.search(r"override '?[+~]*([\w.]+)", texts[0])
    skip = (
        "To append to",
        "Set the environment",
        "full_key:",
        "object_type=",
        "reference_type=",
        "Config search",
        "provider=",
    )
    lines = [line.strip() for text in texts for line in text.splitlines()]
    kept = dict.fromkeys(line for line in lines if line and not line.startswith(skip))
    return key.group(1) if key else "", "\n".join(kept)
