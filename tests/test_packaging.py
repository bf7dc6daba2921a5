"""The package: what the wheel holds, and that a regular and an editable install both work in a fresh environment."""

from __future__ import annotations

import ast
import configparser
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPING: dict[str, str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]  # folder -> turnout/NAME
FOLDERS = tuple(MAPPING)


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    [file] = built.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def tracked() -> set[str]:
    """What the package is made of, as a clone has it."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", *FOLDERS, cwd=ROOT).splitlines()
    return {name for name in listed if (ROOT / name).is_file()}


def test_the_wheel_holds_every_file_of_our_folders_and_no_other(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == {f"turnout/{name}" for name in tracked()} | {"turnout/__init__.py", "turnout/py.typed"}


def test_the_wheel_holds_code_and_configuration_of_each_folder(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    for folder in FOLDERS:
        assert f"turnout/{folder}/__init__.py" in names
    assert {"turnout/conf/serve.yaml", "turnout/conf/generate.yaml"} <= set(names)
    assert any(name.startswith("turnout/conf/experiment/") and name.endswith(".yaml") for name in names)


def test_the_source_archive_builds_the_same_wheel(built: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    [archive] = built.glob("*.tar.gz")
    run("tar", "-xf", archive, "-C", tmp_path, cwd=ROOT)
    [source] = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=source)
    [file] = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(file).namelist()) == sorted(wheel.namelist())


def test_a_wheel_carries_compiled_kernels_where_that_is_asked_for(
    wheel: zipfile.ZipFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is one that makes empty files: what it is asked for, and where that goes, is what counts here."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "$@" >> "$0.log"\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TURNOUT_BUILD_NATIVE", "1")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    [file] = tmp_path.glob("*.whl")
    levels = ("x86-64-v3", "x86-64-v4")
    more = set(zipfile.ZipFile(file).namelist()) - set(wheel.namelist())
    assert {name for name in more if ".dist-info/" not in name} == {
        f"turnout/kernels/cpu/prebuilt/{level}.so" for level in levels
    }
    assert "-py3-none-" in file.name and not file.name.endswith("-any.whl"), "of one platform, for every Python"
    asked = (tmp_path / "compiler.log").read_text()
    assert all(f"-march={level} -shared" in asked for level in levels) and "attention.cpp" in asked


def test_the_metadata_say_what_pip_and_people_need(metadata: Message, wheel: zipfile.ZipFile) -> None:
    assert (metadata["Name"], metadata["Requires-Python"]) == ("turnout", ">=3.11")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) >= {"demo", "dev", "test"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert str(metadata.get_payload()) == (ROOT / "README.md").read_text()


def test_the_demo_weights_are_no_dependency(metadata: Message) -> None:
    required = metadata.get_all("Requires-Dist", [])
    """Not even of an extra: their package asks for llama.cpp, which is compiled."""
    assert not any("smollm2" in line or line.startswith("llama") for line in required)


def test_a_plugin_author_gets_no_server_no_model_library_and_no_laboratory(metadata: Message) -> None:
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.split(">=")[0] for line in required} == {"hydra-core", "numpy", "pluggy", "torch"}


def test_every_entry_point_names_something_that_is_there(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    groups = configparser.ConfigParser()
    groups.read_string(wheel.read(name).decode())
    found = [EntryPoint(entry, value, group) for group in groups.sections() for entry, value in groups.items(group)]
    assert {(entry.group, entry.name) for entry in found} >= {
        ("console_scripts", "turnout"),
        ("turnout", "attention"),
        ("turnout", "scheduler"),
        ("turnout", "preemption"),
        ("turnout", "quant"),
    }
    for entry in found:
        entry.load()


def test_constraints_pin_everything_the_project_asks_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line for line in lines), "exact, and no build of one platform"
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    project = PROJECT["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {line.split(">=")[0].split("[")[0].lower().replace("_", "-") for line in asked} - {"turnout"}
    assert names <= pinned


def test_the_links_that_name_the_folders_for_editable_installs_are_links() -> None:
    """An archive or a checkout without link support would leave small text files here."""
    for folder in FOLDERS:
        link = ROOT / "turnout" / folder
        assert link.is_symlink() and link.resolve() == ROOT / folder
        assert os.readlink(link) == f"../{folder}"


def ours(dotted: str) -> Path | None:
    """Where the checkout has a module, by the table of pyproject.toml alone: no link is followed, nothing is run."""
    folder = next((f for f, place in MAPPING.items() if dotted.split(".")[:2] == place.split("/")), None)
    place = ROOT / "turnout" if dotted == "turnout" else ROOT.joinpath(folder or "", *dotted.split(".")[2:])
    found = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return found[0] if found and (folder or dotted == "turnout") else None


def test_every_import_of_ours_names_a_file_by_the_declared_mapping() -> None:
    """What a drawing of imports, an editor or a search over the checkout goes by."""
    arrows = 0
    for file in (file for folder in (*FOLDERS, "tests") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for dotted in (name for name in named if name.split(".")[0] == "turnout"):
                assert ours(dotted) is not None, f"{file.relative_to(ROOT)}: {dotted}"
                arrows += 1
    assert arrows > 1000
    assert ours("turnout.core.nothing") is None and ours("turnout.nothing") is None


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True], ids=["regular", "editable"])
def test_an_install_into_a_fresh_environment_works(editable: bool, tmp_path: Path) -> None:
    venv.create(tmp_path / "env")
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    running = "\n".join(path for path in sys.path if path.endswith("site-packages"))  # dependencies, and not us
    (site / "dependencies.pth").write_text(running)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run(
        sys.executable, "-m", "pip", "--python", python, "install", *offline, *(["-e"] if editable else []), ROOT,
        cwd=tmp_path,
    )  # fmt: skip
    places = run(
        python, "-c", "import turnout.core as c, turnout.conf as f; print(c.__file__, f.__file__)", cwd=tmp_path
    )
    for place in places.split():
        assert Path(place).is_relative_to(ROOT / "turnout" if editable else site)
    assert "serve" in run(scripts / "turnout", "--help", cwd=tmp_path)
    assert "chunked_prefill" in run(scripts / "turnout", "plugins", cwd=tmp_path)
