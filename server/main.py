"""`turnout`: a command, then Hydra overrides. It composes the configuration and hands it on; it computes nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version

from turnout.core import plugins
from turnout.core.plugins import SLOTS, PluginError

USAGE = """\
turnout: serve large language models, composed from plugins

  turnout serve [OVERRIDE ...]               an OpenAI-compatible server
  turnout generate "PROMPT" [OVERRIDE ...]   complete a prompt here, without a server
  turnout chat [OVERRIDE ...]                chat in this terminal
  turnout plugins                            every choice of every slot, with its options
  turnout plugins doctor                     what cannot work here, and why
  turnout plugins check SLOT=NAME            does a plugin keep its contract?

An override is KEY=VALUE, for example
  turnout serve model=PATH attention=torch scheduler=chunked_prefill scheduler.chunk=512 preemption=swap
  turnout serve experiment=low_latency server.port=9000
  turnout generate "The sea is" sampling.temperature=0 sampling.max_tokens=32
  turnout COMMAND --help       every key and its default
  turnout COMMAND --cfg job    the composed configuration
"""
COMMANDS = ("serve", "generate", "chat")
FREE_TEXT = ("model", "prompt", "system", "server.served_model_name", "server.api_key")  # quoted for Hydra where needed


class Usage(Exception):
    """The command line is wrong; the message says how to right it."""


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit codes: 0 done, 1 it failed, 2 the command or configuration is wrong."""
    args = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(
        level=os.environ.get("TURNOUT_LOG", "WARNING").upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return
    if args[0] in ("-V", "--version", "version"):
        print(f"turnout {version('turnout')}")
        return
    try:
        if args[0] == "plugins":
            from turnout.server.plugins_cli import run

            sys.exit(run(args[1:]))
        if args[0] not in COMMANDS:
            raise Usage(f"there is no command {args[0]!r}; the commands are {', '.join(COMMANDS)}, plugins")
        _compose(args[0], args[1:])
    except (Usage, PluginError) as error:
        _complain(error)
        sys.exit(2)


def _compose(command: str, args: list[str]) -> None:
    """Run `command` on the configuration that Hydra composes from the overrides."""
    found = plugins.load()
    prompt = args.pop(0) if command == "generate" and args and not _is_override(args[0]) else None
    if command != "generate" and any(a in ("-m", "--multirun") for a in args):
        raise Usage(f"turnout {command} does one thing at a time; --multirun is for generate and benchmarks")
    overrides = [_checked(arg, found, "-m" in args or "--multirun" in args) for arg in args]
    if found.presets:
        overrides.append(f"hydra.searchpath=[{','.join(f'pkg://{package}' for package in found.presets)}]")
    for name, why in found.faults.items():
        logging.getLogger("turnout").warning("plugin %s is skipped: %s", name, why)
    import hydra
    from omegaconf import DictConfig

    import turnout.core.config  # noqa: F401  stores the schemas

    def task(composed: DictConfig) -> None:
        sys.exit(_run(command, composed, prompt)) if "-m" not in args and "--multirun" not in args else _run_of_many(
            command, composed, prompt
        )

    sys.argv = [f"turnout {command}", *overrides]
    hydra.main(version_base=None, config_path="pkg://turnout.conf", config_name=command)(task)()


def _run(command: str, composed: object, prompt: str | None) -> int:
    from omegaconf import DictConfig

    from turnout.core.checkpoint import ModelError
    from turnout.core.config import GenerateConfig, resolve

    assert isinstance(composed, DictConfig)
    try:
        config = resolve(composed)
        if isinstance(config, GenerateConfig) and prompt is not None:
            config.prompt = prompt
        return _action(command)(config)
    except (ModelError, PluginError, ValueError) as error:
        _complain(error)
        return 2
    except KeyboardInterrupt:
        return 130


def _run_of_many(command: str, composed: object, prompt: str | None) -> None:
    """One point of a sweep; the first that fails ends it."""
    code = _run(command, composed, prompt)
    if code:
        sys.exit(code)


def _action(command: str) -> Callable[..., int]:
    """The function behind a command, imported when it is asked for."""
    if command == "serve":
        from turnout.server.serve import serve

        return serve
    from turnout.server import offline

    return offline.generate if command == "generate" else offline.chat


def _is_override(arg: str) -> bool:
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


def _checked(arg: str, found: plugins.Plugins, many: bool) -> str:
    """An override as Hydra should see it. Raises for a plugin that can't be used, or a value that needs quoting."""
    key, equals, value = arg.partition("=")
    slot = key.lstrip("+")
    if equals and slot in SLOTS:
        for name in value.split(",") if many else [value]:
            if re.fullmatch(r"[\w-]+", name):
                found.get(slot, name)
    if not equals or arg.startswith("-"):
        return arg
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    with contextlib.suppress(HydraException):
        OverridesParser.create().parse_override(arg)
        return arg
    if slot in FREE_TEXT:
        return f"{key}={_quoted(value)}"
    raise Usage(
        f"{arg!r} cannot be read as KEY=VALUE. A value with spaces or one of = , # @ {{ }} [ ] must be quoted for Hydra inside "
        f"the shell's own quotes: {_shell(f'{key}={_quoted(value)}')}"
    )


def _quoted(value: str) -> str:
    """`value` as a quoted string of Hydra's override grammar."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"


def _shell(text: str) -> str:
    return '"' + re.sub(r'(["$`\\])', r"\\\1", text) + '"'


def _complain(error: Exception) -> None:
    print(f"turnout: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
