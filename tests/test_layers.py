"""Who may import whom: the rules that keep the core small and the plugins replaceable. `helpers/rooms.py` states them.

The source is read, not run, except where the rule is about what an import brings with it.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys

import rooms

import turnout.core

CORE = [module for module in rooms.files() if rooms.room(module) == "core"]
PLUGINS = [module for module in rooms.files() if rooms.room(module) == "plugins"]
PUBLIC = (
    "turnout.core",
    "turnout.core.model",
    "turnout.core.optional",
    "turnout.core.structured",
    "turnout.core.parsers",
)
HEAVY = {"triton", "flash_attn", "flashinfer", "ray", "transformers"}  # what a plugin imports when it is chosen


def test_a_room_reaches_nothing_but_the_rooms_below_it() -> None:
    for module in rooms.files():
        here = rooms.room(module)
        if here is None:
            assert not rooms.arrows()[module], f"{module} stands in no room and imports ours"
            continue
        for target, way in rooms.ways(module).items():
            there = rooms.room(target)
            assert there in (here, *rooms.ROOMS[here], None), f"{here} may not import {there}: {' → '.join(way)}"


def test_no_files_import_each_other_in_a_circle() -> None:
    """When they run, in functions too. A contract and what it is handed may name each other for type checkers."""
    assert rooms.circles(rooms.arrows(typed=False)) == []


def test_the_search_finds_circles_and_the_way_round_others() -> None:
    graph = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"b"}), "d": frozenset({"d", "a"})}
    assert rooms.circles(graph) == [["b", "c"], ["d"]]


def test_a_plugin_imports_public_names_of_the_core_its_own_package_and_kernels() -> None:
    for module in PLUGINS:
        own = ".".join(module.split(".")[:3])  # turnout.plugins.SLOT
        for source, name in rooms.imports(module):
            if f"{source}.".startswith((f"{own}.", "turnout.kernels.")) or source.split(".")[0] != "turnout":
                continue
            if (source, name) == ("turnout", "kernels"):
                continue
            public = importlib.import_module(source).__all__ if source in PUBLIC else ()
            assert name in public, f"{module} imports {source}.{name}"


def test_the_data_types_import_nothing_of_ours() -> None:
    assert not rooms.arrows()["turnout.core.types"]


def test_the_core_needs_no_hydra_and_meets_pluggy_in_one_file() -> None:
    for module in CORE:
        used = {source.split(".")[0] for source, _ in rooms.imports(module)} & {"hydra", "omegaconf", "pluggy"}
        assert used <= ({"pluggy"} if module == "turnout.core.hooks" else set()), f"{module} imports {used}"


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


def at_once(module: str) -> set[str]:
    """Top-level names of what a file imports when it is imported, unless in a function or for type checkers."""
    found = set()
    for node in ast.parse(rooms.files()[module].read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_listing_plugins_imports_no_kernel_library_and_no_model_library() -> None:
    """Modules of Triton kernels import it at their top; whoever uses them imports them in a function."""
    assert not imported_by(*(module for module in PLUGINS if "triton" not in at_once(module))) & HEAVY


def test_importing_the_core_brings_no_model_library_no_server_and_no_configuration() -> None:
    assert not imported_by("turnout.core") & {"fastapi", "uvicorn", "hydra", "omegaconf", *HEAVY}


def test_a_newcomer_reads_the_core_in_an_hour() -> None:
    """The aim is 2,500 lines, 2,900 with what speculation, grammars and parallel runners need in it.

    Not reached yet: the bound is what it has come down to, so that it grows no more. Nothing is moved out for the number.
    """
    lines = {module: len(rooms.files()[module].read_text().splitlines()) for module in CORE}
    assert sum(lines.values()) < 3100, f"core/ has {sum(lines.values())} lines: {lines}"


def test_the_tour_shows_the_rooms_as_they_are() -> None:
    page = rooms.TOUR.read_text()
    assert rooms.renewed(page) == page, "python tests/helpers/rooms.py draws the picture anew"
