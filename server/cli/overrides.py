"""Command-line overrides before Hydra sees them: quoted where people forget to, refused where Hydra would puzzle them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from turnout.compose.plugins import SLOTS, PluginError, Plugins
from turnout.server.cli.keys import did_you_mean, keys_of
from turnout.server.cli.texts import as_typed, quoted

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from turnout.compose.config import Config

MANY = ("-m", "--multirun")
WITH_VALUE = ("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir")


class Usage(Exception):
    """The command line is wrong; the message says how to right it."""


def checked(args: list[str], found: Plugins) -> list[str]:
    """The overrides as Hydra should see them.

    Raises PluginError for a choice that can't be used, Usage for what is no override and for a value that must be quoted.
    """
    args = list(_enforced(args))
    many = any(arg in MANY for arg in args)
    values = {index + 1 for index, arg in enumerate(args) if arg in WITH_VALUE}
    return [arg if index in values else _checked(arg, found, many) for index, arg in enumerate(args)]


def _enforced(args: list[str]) -> Iterator[str]:
    """The arguments with vLLM's `enforce_eager=true` as `runner.mode=eager`; false asks for nothing.

    Raises Usage when another mode is asked for too.
    """
    for arg in args:
        key, _, value = arg.partition("=")
        if key.lstrip("+") != "enforce_eager":
            yield arg
            continue
        if value.lower() not in ("true", "false"):
            raise Usage(f"enforce_eager takes true or false, got {value!r}")
        if value.lower() == "true":
            modes = [other for other in args if other.lstrip("+").startswith("runner.mode=")]
            if other := next((mode for mode in modes if mode.partition("=")[2].strip("'\"") != "eager"), None):
                raise Usage(f"{arg} means runner.mode=eager, and {other} asks for another mode: drop one of the two")
            yield "runner.mode=eager"


def _checked(arg: str, found: Plugins, many: bool) -> str:
    key, equals, value = arg.partition("=")
    slot = key.lstrip("+")
    if arg.startswith(("-", "~")):
        return arg
    if not equals:
        raise Usage(f"{arg!r} is no override: write KEY=VALUE, such as model={_shell(arg)}")
    if slot in SLOTS:
        if slot != key:
            raise Usage(f"{slot} has a choice already, so there is nothing to add: write {slot}={value}")
        for name in value.split(",") if many else [value]:
            plain = re.fullmatch(r"(['\"]?)((?:[\w.-]+:)?[\w-]+)\1", name.strip())
            if plain is None:
                known = ", ".join(found.names(slot))
                raise Usage(f"{slot} takes the name of one choice, got {name!r}. Installed here: {known}")
            try:
                found.get(slot, plain.group(2))
            except PluginError as error:
                near = did_you_mean(plain.group(2), found.names(slot))
                raise PluginError(f"{slot}={plain.group(2)}{near}\n{error}" if near else str(error)) from error
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if not (many and "," in value) and (text := as_typed(slot, value, found)) is not None:
        return f"{key}={text}"
    for readable in (arg, f"{key}={_from_json(value)}"):
        with contextlib.suppress(HydraException):
            OverridesParser.create().parse_override(readable)
            return readable
    hint = f"must be quoted for Hydra inside the shell's own quotes: {_shell(f'{key}={quoted(value)}')}"
    if value.startswith(("{", "[")):
        hint += f"; a mapping is written {_shell(f'{key}={{name: value}}')}, a list {_shell(f'{key}=[value, value]')}"
    raise Usage(f"{arg!r} cannot be read as KEY=VALUE. A value with spaces or one of = , # @ {{ }} [ ] {hint}")


def _from_json(value: str) -> str:
    """A JSON object or list as Hydra spells it; anything else as it is."""
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return _spelled(found) if isinstance(found, dict | list) else value


def _spelled(value: object) -> str:
    if isinstance(value, dict):
        keys = {name: re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", name) for name in value}  # its keys take no quotes
        return "{" + ", ".join(f"{keys[name]}: {_spelled(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_spelled, value)) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def _shell(text: str) -> str:
    return '"' + re.sub(r'(["$`\\])', r"\\\1", text) + '"'


def try_composing(command: str, overrides: list[str], found: Plugins) -> DictConfig:
    """Compose once before anything starts. Raises Usage naming what was wrong, the package, and what it takes."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    import turnout.server.config  # noqa: F401  stores the schemas

    GlobalHydra.instance().clear()
    with initialize_config_module("turnout.conf", version_base=None):
        try:
            return compose(command, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            key, text = _reason(error)
            parent, _, _ = key.rpartition(".")
            kept = [o for o in overrides if not _sets(o, key)]
            with contextlib.suppress(HydraException, OmegaConfBaseException):
                whole = compose(command, kept)
                place = key if isinstance(OmegaConf.select(whole, key), DictConfig) else parent
                node = OmegaConf.select(whole, place) if place else whole
                known = [*SLOTS, *(known.name for known in keys_of(whole))]
                near = "" if key in known else did_you_mean(key, known)
                raise Usage(f"{text}{near}\n{_what_it_takes(node, place, found)}") from error
            raise Usage(text) from error
        finally:
            GlobalHydra.instance().clear()


def objects(composed: DictConfig, found: Plugins) -> Config:
    """The composed configuration as objects. Raises what `vet` raises."""
    from turnout.compose.config import resolve

    vet(composed, found)
    return resolve(composed)


def vet(composed: DictConfig, found: Plugins) -> None:
    """Check that everything composed can be made.

    Raises Usage for a key that nothing reads or that has no value, PluginError naming a plugin whose component can't be
    made, and what the options raise for their values.
    """
    from omegaconf import OmegaConf

    for node, key in _strangers(composed, ""):
        raise Usage(f"nothing reads {key}. {_what_it_takes(node, key.rpartition('.')[0], found)}")
    for key in sorted(OmegaConf.missing_keys(composed)):
        if key in SLOTS:
            raise Usage(f"{key} has no choice: write {key}=NAME. Installed here: {', '.join(found.names(key))}")
        raise Usage(f"{key} has no default: write {key}=VALUE")
    for slot in (slot for slot in SLOTS if slot in composed):
        try:
            OmegaConf.to_object(composed[slot])
        except ValueError:
            raise  # the value of an option is wrong
        except Exception as error:
            name = next(c for c in found.choices.values() if c.component is OmegaConf.get_type(composed[slot]))
            raise PluginError(
                f"{slot}={name.name} of {name.package} {name.version} cannot be made: {type(error).__name__}: {error}. "
                f"Upgrade or uninstall {name.package}; TURNOUT_BLOCK={name.plugin} skips it."
            ) from error


def _strangers(node: DictConfig, path: str) -> Iterator[tuple[DictConfig, str]]:
    """Keys that a `+` put where no dataclass has them, each with the node it is in."""
    from omegaconf import DictConfig, OmegaConf

    kind = OmegaConf.get_type(node)
    known = {spec.name for spec in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(node)
    for name in node:
        key = f"{path}{name!s}"
        if name not in known:
            yield node, key
        elif not OmegaConf.is_missing(node, name) and isinstance(node[name], DictConfig):
            yield from _strangers(node[name], f"{key}.")


def _sets(override: str, key: str) -> bool:
    return override.partition("=")[0].lstrip("+~") == key


def _what_it_takes(node: object, parent: str, found: Plugins) -> str:
    """The options in `node`, which is at `parent`."""
    from omegaconf import OmegaConf

    kind = OmegaConf.get_type(node)
    known = [spec.name for spec in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    names = ", ".join(f"{parent}.{name}" if parent else name for name in known)
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
