"""`turnout plugins new` writes packages that keep their contracts; a single file is a plugin too."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from turnout.compose import plugins
from turnout.compose.plugins import PluginError
from turnout.server.cli import main, new_plugin, plugins_cli
from turnout.testing import check_component


@pytest.mark.parametrize(
    "slot",
    ["scheduler", "preemption", *(pytest.param(slot, marks=pytest.mark.slow) for slot in ("attention", "quant"))],
)
def test_a_new_package_keeps_its_contract_and_its_tests_run_the_kit(
    slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"made_for_{slot}"
    new_plugin.write(slot, name, str(tmp_path / "new"))
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    found = plugins.collect([], {name: importlib.import_module(name)})
    assert not found.faults
    component = found.get(slot, name).component
    assert not [rule for rule in check_component(slot, component) if rule.fault]
    monkeypatch.syspath_prepend(str(tmp_path / "new" / "tests"))
    tests = importlib.import_module(f"test_{name}")
    assert any(getattr(kind, "make", None) is component for kind in vars(tests).values())
    del sys.modules[tests.__name__]
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_every_slot_that_packages_are_written_for_is_one_and_others_are_refused(tmp_path: Path) -> None:
    assert set(new_plugin.KINDS) <= set(plugins.ALL_SLOTS)
    for slot, name, why in (
        ("runner", "mine", "a package can be written for scheduler"),
        ("schedular", "mine", "there is no such slot"),
        ("scheduler", "My-Policy", "must be a Python module's name"),
        ("scheduler", "class", "must be a Python module's name"),
    ):
        with pytest.raises(PluginError, match=why):
            new_plugin.write(slot, name, str(tmp_path / "new"))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").touch()
    with pytest.raises(PluginError, match="is there already"):
        new_plugin.write("scheduler", "mine", str(tmp_path / "new"))


FILE = """
from __future__ import annotations
from dataclasses import dataclass
from turnout.core import Policy, hookimpl

@dataclass
class Mine(Policy):
    limit: int | None = None  # how many there may be
    share: float = 0.5
    "what everybody gets"

@hookimpl
def register_schedulers(register):
    register("mine", Mine)
"""


def turnout(*args: str) -> object:
    try:
        main.main(list(args))
    except SystemExit as exit:
        return exit.code
    return 0


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(plugins.FILES, "")
    monkeypatch.setattr(plugins, "_loaded", None)
    (tmp_path / "my_policy.py").write_text(FILE)
    return tmp_path / "my_policy.py"


def test_a_file_is_a_plugin_in_any_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert turnout("plugins", f"plugin={file}") == 0
    said = capsys.readouterr().out
    assert "scheduler.limit=null  (int | None)  how many there may be" in said
    assert "scheduler.share=0.5  (float)  what everybody gets" in said
    assert plugins.load().get("scheduler", "mine").version != "?" and str(file) in os.environ[plugins.FILES]
    turnout("serve", f"plugin={file}", "scheduler=mine", "scheduler.limit=3", "--cfg", "job")
    assert "limit: 3" in capsys.readouterr().out


def test_a_file_that_is_not_there_or_broken_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert turnout("plugins", "plugin=./nowhere.py") == 2
    assert "plugin=./nowhere.py: there is no such file" in capsys.readouterr().err
    file.write_text("def broken(:")
    assert turnout("plugins", "doctor", f"plugin={file}") == 1
    assert "plugin 'my_policy' of my_policy" in capsys.readouterr().out


def test_a_check_takes_options_and_refuses_others(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*args: str) -> object:
        return turnout("plugins", "check", *args, f"plugin={file}")

    assert check("scheduler=chunked_prefill", "chunk=7", "scheduler.target_itl=null") == 0
    assert "ok   its options are valid" in capsys.readouterr().out
    assert check("scheduler=chunked_prefill", "chunk=0") == 2
    assert "scheduler.chunk must be at least 1, got 0" in capsys.readouterr().err
    assert check("scheduler=chunked_prefill", "chunk=many") == 2
    assert "many" in capsys.readouterr().err
    assert check("scheduler=chunked_prefill", "chank=7") == 2
    assert "did you mean chunk?" in capsys.readouterr().err
    assert check("attention=auto") == 2
    assert "attention=auto stands for another choice" in capsys.readouterr().err


def test_doctor_is_content_where_only_hardware_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import entry_points

    ours = plugins.collect(
        [entry for entry in entry_points(group="turnout") if entry.dist and entry.dist.name == "turnout"]
    )
    monkeypatch.setattr(plugins, "load", lambda: ours)
    monkeypatch.setattr(plugins_cli, "_has", lambda device: device == "cpu")
    assert plugins_cli.run(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "attention=triton of turnout: needs a device of type cuda" in said and "nothing wrong" in said
    assert "loaded in" in said
