"""What is used of transformers' private parts is listed in one file, and is there in the release that is installed."""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import transformers
from packaging.specifiers import SpecifierSet

from turnout.plugins.loader import private

ROOT = Path(__file__).parents[3]
PUBLIC = {"transformers", "transformers.utils"}  # documented; `from transformers.utils import logging`
LISTS = ROOT / "plugins" / "loader" / "private.py"
WARMED = ROOT / "server" / "cli" / "serve.py"  # imports a module early and takes nothing from it


def missing() -> Iterator[str]:
    release = f"transformers {transformers.__version__}"
    for module, names in private.NAMES.items():
        for name, use in names.items():
            try:
                found = hasattr(importlib.import_module(module), name)
            except ImportError:
                found = False
            if not found:
                yield f"{release} has no {module}.{name}: {use}"
    models = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    converter = importlib.import_module("transformers.core_model_loading")
    converter = converter.WeightConverter(["a"], ["b"], [converter.Transpose()])
    for owner, members in ((models, private.MEMBERS), (converter, private.CONVERTER)):
        yield from (f"{release}: no {name}: {use}" for name, use in members.items() if not hasattr(owner, name))


def test_this_release_of_transformers_has_all_that_is_used_of_its_private_parts() -> None:
    assert not list(missing())


def test_a_release_that_renames_something_is_named(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(transformers, "__version__", "5.99")
    monkeypatch.setitem(private.NAMES, "transformers.pytorch_utils", {"Conv1E": "layers stored as [in, out]"})
    monkeypatch.setitem(private.MEMBERS, "_is_stately", "whether tokens meet outside attention")
    assert list(missing()) == [
        "transformers 5.99 has no transformers.pytorch_utils.Conv1E: layers stored as [in, out]",
        "transformers 5.99: no _is_stately: whether tokens meet outside attention",
    ]


def test_no_other_file_takes_anything_from_a_module_that_is_not_public() -> None:
    taken = set()
    for room in ("core", "kernels", "plugins", "server", "lab", "testing"):
        for file in (ROOT / room).rglob("*.py"):
            if file in (LISTS, WARMED):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                    taken |= {(str(node.module), alias.name, file.name) for alias in node.names}
    private_ones = {(module, name) for module, name, _ in taken if module not in PUBLIC}
    assert private_ones <= {(module, name) for module, names in private.NAMES.items() for name in names}
    assert all("gguf" in module for module, _ in private_ones), "the GGUF format alone imports for itself"


def test_the_releases_that_were_tried_are_bounded() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    (bound,) = [line.removeprefix("transformers") for line in wanted if line.startswith("transformers")]
    assert transformers.__version__ in SpecifierSet(bound) and "6.0" not in SpecifierSet(bound)
