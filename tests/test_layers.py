"""Who may import whom: the rules that keep the core small and the plugins replaceable.

The source is read, not run, except where the rule is about what an import brings with it.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import turnout.core

ROOT = Path(__file__).parents[1]
OURS = ("core", "compose", "kernels", "plugins", "conf", "server", "lab", "testing")
FILES = sorted(file for folder in OURS for file in (ROOT / folder).rglob("*.py"))
PLUGINS = [file for file in FILES if file.is_relative_to(ROOT / "plugins")]
CORE = [file for file in FILES if file.is_relative_to(ROOT / "core")]
HEAVY = ("triton", "flash_attn", "flashinfer", "ray", "transformers")  # what a plugin imports when it is chosen


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def module(file: Path) -> str:
    parts = ("turnout", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[tuple[str, str | None]]:
    """Every (module, name) a file imports anywhere, in functions and for type checkers too; name None: all of it."""
    for node in ast.walk(ast.parse(file.read_text(), name(file))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(file)}: relative imports are not used here"
            yield from ((node.module or "", alias.name) for alias in node.names)


def reaches(file: Path, package: str) -> list[str]:
    """What a file imports of a package, as dotted names."""
    found = [f"{source}.{item}" if item else source for source, item in imports(file)]
    return [target for target in found if target == package or target.startswith(package + ".")]


@pytest.mark.parametrize("file", FILES, ids=name)
def test_our_folders_are_imported_only_below_turnout(file: Path) -> None:
    for folder in OURS:
        assert not reaches(file, folder)


def test_the_data_types_import_nothing_of_ours() -> None:
    assert not reaches(ROOT / "core/types.py", "turnout")


@pytest.mark.parametrize("file", CORE, ids=name)
def test_the_core_knows_no_plugin_no_server_and_no_configuration_files(file: Path) -> None:
    for layer in ("compose", "plugins", "server", "conf"):
        assert not reaches(file, f"turnout.{layer}")


SHARED = ("turnout.kernels.",)
PUBLIC = (
    "turnout.core",
    "turnout.core.model",
    "turnout.core.optional",
    "turnout.core.structured",
    "turnout.core.parsers",
)


@pytest.mark.parametrize("file", [file for file in PLUGINS if module(file).startswith(SHARED)], ids=name)
def test_what_plugins_share_knows_no_core(file: Path) -> None:
    assert not reaches(file, "turnout.core")


@pytest.mark.parametrize("file", PLUGINS, ids=name)
def test_a_plugin_imports_public_names_of_the_core_and_its_own_package(file: Path) -> None:
    """Our plugins share kernels and a cache folder; neither knows the core."""
    own = ".".join(module(file).split(".")[:3])  # turnout.plugins.SLOT
    for source, item in imports(file):
        if source.split(".")[0] != "turnout" or source == own or source.startswith(own + "."):
            continue
        if f"{source}.{item}".startswith(SHARED):
            continue
        public = importlib.import_module(source).__all__ if source in PUBLIC else ()
        assert item in public, f"{name(file)} imports {source}.{item}"


@pytest.mark.parametrize("file", CORE, ids=name)
def test_the_core_needs_no_hydra_and_meets_pluggy_in_one_file(file: Path) -> None:
    for library in ("hydra", "omegaconf", *(() if name(file) == "core/hooks.py" else ("pluggy",))):
        assert not reaches(file, library)


def test_the_public_names_are_all_there_and_few() -> None:
    """`turnout.core` is what most authors need; the rest lies in modules that say for whom they are."""
    for module in map(importlib.import_module, PUBLIC):
        assert all(hasattr(module, public) for public in module.__all__), module.__name__
    assert len(turnout.core.__all__) <= 26


def imported_by(*modules: str) -> set[str]:
    """Top-level names in sys.modules after importing these in a fresh interpreter."""
    code = f"import sys\nfor module in {modules!r}: __import__(module)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {loaded.split(".")[0] for loaded in done.stdout.split()}


def at_once(file: Path) -> Iterator[str]:
    """Top-level names of what a file imports when it is imported, unless in a function or for type checkers."""
    for node in ast.parse(file.read_text(), name(file)).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def test_listing_plugins_imports_no_kernel_library_and_no_model_library() -> None:
    """Modules of Triton kernels import it at their top; whoever uses them imports them in a function."""
    listed = [file for file in PLUGINS if "triton" not in at_once(file)]
    assert not imported_by(*map(module, listed)) & set(HEAVY)


def test_importing_the_core_brings_no_model_library_no_server_and_no_configuration() -> None:
    assert not imported_by("turnout.core") & {"transformers", "fastapi", "uvicorn", "hydra", "omegaconf", *HEAVY}


def test_a_newcomer_reads_the_core_in_an_hour() -> None:
    lines = {name(file): len(file.read_text().splitlines()) for file in CORE}
    assert sum(lines.values()) < 3300, f"core/ has {sum(lines.values())} lines: {lines}"
