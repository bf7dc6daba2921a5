"""`turnout`: a command, then Hydra overrides. It composes the configuration and hands it on; it computes nothing."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING

from turnout.compose import plugins
from turnout.compose.plugins import PluginError
from turnout.server.cli import extras
from turnout.server.cli.arguments import ordered, split_prompt
from turnout.server.cli.composing import config_dirs, installed, run_hydra, searchpath, show
from turnout.server.cli.keys import did_you_mean
from turnout.server.cli.overrides import MANY, Usage, checked, objects, try_composing
from turnout.server.cli.progress import complain

if TYPE_CHECKING:
    from omegaconf import DictConfig

USAGE = """\
turnout: serve large language models, composed from plugins

  turnout serve [OVERRIDE ...]               an OpenAI-compatible server
  turnout generate "PROMPT" [OVERRIDE ...]   complete a prompt here, without a server
  turnout chat [OVERRIDE ...]                chat in this terminal
  turnout top [url=URL]                      what a running server is doing
  turnout replay FILE                        a run recorded with record=FILE again: the same decisions?
  turnout why FILE REQUEST_ID                where the time of a recorded request went
  turnout trace FILE [out=FILE]              a recording as a trace for ui.perfetto.dev
  turnout simulate [OVERRIDE ...]            the same scheduler and memory under a virtual clock, without a model
  turnout ab b="[OVERRIDE, ...]"             what a change does to the answers and to the speed; exit code 0: nothing
  turnout bench [OVERRIDE ...]               how fast a composition is, here or behind a URL
  turnout tune [OVERRIDE ...]                a better composition for a workload and a goal, with the evidence
  turnout quantize method=... out=FOLDER     a smaller checkpoint of a model, which other engines load too
  turnout plugins                            every choice of every slot, with its options
  turnout plugins doctor                     what cannot work here, and why
  turnout plugins check SLOT=NAME [OPTION=VALUE ...]   does a plugin keep its contract?
  turnout plugins new SLOT NAME              a package for a plugin of your own, with its tests

An override is KEY=VALUE, for example
  turnout serve model=PATH attention=torch scheduler=chunked_prefill scheduler.chunk=512 preemption=swap
  turnout serve experiment=low_latency server.port=9000
  turnout serve plugin=./my_policy.py scheduler=mine     a plugin in a file of its own
  turnout generate "The sea is" sampling.temperature=0 sampling.max_tokens=32
  turnout COMMAND --help       every key and its default
  turnout COMMAND --cfg job    the composed configuration
"""
COMMANDS = ("serve", "generate", "chat")
ENTRY_POINTS = "turnout.commands"


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit codes: 0 done, 1 it failed, 2 the command or configuration is wrong."""
    args = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return
    if args[0] in ("-V", "--version", "version"):
        print(f"turnout {version('turnout')}")
        return
    try:
        _set_up_log(os.environ.get("TURNOUT_LOG") or "WARNING")
        args = _plugin_files(args)
        if args[0] == "plugins":
            from turnout.server.cli.plugins_cli import run

            sys.exit(run(args[1:]))
        if (command := _commands().get(args[0])) is not None:
            if command.dist is not None and command.dist.name == "turnout":
                extras.check(args[0], "lab")
            sys.exit(command.load()(args[1:]))
        if args[0] not in COMMANDS:
            known = (*COMMANDS, *sorted(_commands()), "plugins")
            near = did_you_mean(args[0], known)
            raise Usage(f"there is no command {args[0]!r}{near or '; the commands are ' + ', '.join(known)}")
        extras.check(args[0], "serve")
        _compose(args[0], args[1:])
    except (Usage, PluginError) as error:
        complain(error)
        sys.exit(2)


def _plugin_files(args: list[str]) -> list[str]:
    """The arguments without plugin=FILE, which any command takes: the engine's process finds the files by the environment."""
    files = [arg.partition("=")[2] for arg in args if arg.startswith("plugin=")]
    for file in files:
        if not Path(file).expanduser().is_file():
            raise Usage(
                f"plugin={file}: there is no such file; it takes a Python file that registers like a plugin package"
            )
    if files:
        known = filter(None, os.environ.get(plugins.FILES, "").split(os.pathsep))
        os.environ[plugins.FILES] = os.pathsep.join(
            [*known, *(str(Path(file).expanduser().resolve()) for file in files)]
        )
    return [arg for arg in args if not arg.startswith("plugin=")]


def _set_up_log(level: str) -> None:
    """Raises Usage for a level that there is none of."""
    known = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if level.upper() not in known:
        raise Usage(f"TURNOUT_LOG must be one of {', '.join(known)}, got {level!r}")
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")


def _commands() -> dict[str, EntryPoint]:
    """Commands that packages bring, the laboratory's own among them: functions of the arguments that return the exit code."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _compose(command: str, args: list[str]) -> None:
    """Run `command` on the configuration that Hydra composes from the overrides."""
    import turnout.server.config  # noqa: F401  stores the schemas

    found = installed()
    prompt = None
    if command == "generate":
        args, prompt = split_prompt(args, found)
    args, folders = config_dirs(args if command == "generate" else ordered(args, command, found))
    many = any(arg in MANY for arg in args)
    if command != "generate" and many:
        raise Usage(f"turnout {command} does one thing at a time; --multirun is for generate and benchmarks")
    overrides = [*searchpath(found, folders), *checked(args, found)]
    flags = [arg for arg in overrides if arg.startswith("-")]
    if flags and not many:
        first = overrides.index(flags[0])
        show(command, overrides[:first], overrides[first:])
        return
    if not flags:
        try_composing(command, overrides, found)

    def task(composed: DictConfig) -> None:
        if many:
            _label(args)
        code = _run(command, composed, prompt)
        if code or not many:  # the first point of a sweep that fails ends it
            sys.exit(code)

    run_hydra(command, overrides, task)


def _label(args: Sequence[str]) -> None:
    """Say which point of a sweep comes now: the overrides that are not the same for all."""
    from hydra.core.hydra_config import HydraConfig

    mine = [override for override in HydraConfig.get().overrides.task if override not in args]
    print(f"--- {' '.join(mine)}", flush=True)


def _run(command: str, composed: DictConfig, prompt: str | None) -> int:
    from turnout.core import ModelError
    from turnout.server.config import GenerateConfig

    try:
        config = objects(composed, plugins.load())
        if isinstance(config, GenerateConfig) and prompt is not None:
            config.prompt = prompt
        return _action(command)(config)
    except (ModelError, PluginError, Usage, ValueError) as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        return 130


def _action(command: str) -> Callable[..., int]:
    """The function behind a command, imported when it is asked for."""
    if command == "serve":
        from turnout.server.cli.serve import serve

        return serve
    from turnout.server.cli import offline

    return offline.generate if command == "generate" else offline.chat


if __name__ == "__main__":
    main()
