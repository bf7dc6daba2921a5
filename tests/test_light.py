"""What a plugin author installs, `pip install turnout`, is enough to write a plugin, to check it, and to be told the rest."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCKER = """
import importlib.metadata as metadata, importlib.util, sys
BLOCKED = {blocked!r}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
look = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in BLOCKED else look(name, package)
known = metadata.version
def version(name):
    if name.replace("-", "_") in BLOCKED:
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
from turnout.server.cli.main import main
for args in {commands!r}:
    print("$", *args, flush=True)
    try:
        main(list(args))
    except SystemExit as exit:
        print("exit code", exit.code, flush=True)
"""
COMMANDS = (("plugins", "doctor"), ("plugins", "check", "scheduler=priority"), ("serve",), ("simulate",))


def absent() -> set[str]:
    """The modules of every extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = [
        line for extra in ("serve", "gguf", "lab", "plot", "structured", "xgrammar", "triton") for line in extras[extra]
    ]
    names = {re.split(r"[>\[;]", line)[0].strip().replace("-", "_") for line in listed} - {"turnout"}
    return names - {"jinja2"}  # torch's own  # noqa: RUF100


def test_without_any_extra_plugins_are_listed_and_checked_and_commands_say_what_installation_brings_them() -> None:
    """In one process of its own, where every module that an extra brings can't be imported."""
    code = BLOCKER.format(blocked=absent() | {"starlette", "pydantic"}, commands=COMMANDS)
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=True,
    )
    doctor, check, serve, simulate = done.stdout.split("$ ")[1:]
    assert "nothing wrong" in doctor and "exit code 0" in doctor, doctor
    assert " 0 failed" in check and "exit code 0" in check, check
    for said, extra in ((serve, "serve"), (simulate, "lab")):
        assert f"pip install 'turnout[{extra}]'" in said and "transformers" in said and "exit code 2" in said, said
    assert "Traceback" not in done.stdout
