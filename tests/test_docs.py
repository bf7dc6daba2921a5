"""The documents keep their word: their Python runs, every hook is described, the example is short."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from turnout.compose import plugins
from turnout.compose.config import Limits
from turnout.compose.conformance import members
from turnout.core import hooks, optional
from turnout.server.config import SamplingConfig, ServerConfig
from turnout.testing import check_component

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_python_in_the_documents_runs() -> None:
    """Whole programs that need no running server."""
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for number, code in enumerate(blocks):
            if "import" in code and "base_url" not in code:
                compiled = compile(code, f"{page.name} block {number}", "exec")
                exec(compiled, {"__name__": __name__})  # noqa: S102  ours; dataclasses look the name up


def test_every_hook_is_in_the_plugin_guide_with_its_exact_arguments() -> None:
    guide = (ROOT / "docs" / "plugins.md").read_text()
    callers = vars(hooks.new_hooks().hook)
    assert len(callers) >= 8
    for name, caller in callers.items():
        assert f"`{name}({', '.join(caller.spec.argnames)})`" in guide


@pytest.mark.parametrize(
    ("page", "name"),
    [("README.md", "SJF"), ("CONTRIBUTING.md", "LIFO"), ("docs/plugins.md", "Newest"), ("docs/plugins.md", "Quota")],
)
def test_the_schedulers_in_the_documents_keep_their_contract(page: str, name: str) -> None:
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {"__name__": __name__}
    (code,) = (dedent(block) for block in blocks if f"class {name}" in block)
    exec(compile(code, page, "exec"), scope)  # noqa: S102  ours
    broken = [
        f"{checked.rule}: {checked.fault}" for checked in check_component("scheduler", scope[name]) if checked.fault
    ]
    assert broken == []


def test_every_word_of_the_glossary_is_in_the_code() -> None:
    """In the source of the core and of its plugins, by the same spelling."""
    source = "".join(file.read_text() for room in ("core", "plugins") for file in sorted((ROOT / room).rglob("*.py")))
    names = set(re.findall(r"\w+", source))
    _, _, glossary = (ROOT / "docs/tour.md").read_text().partition("## Glossary")
    rows = [line for line in glossary.splitlines() if line.startswith("| ") and not line.startswith("| word")]
    assert len(rows) > 20
    used = {part for row in rows for code in re.findall(r"`([^`]+)`", row) for part in code.split(".")} - {"n"}
    assert sorted(used - names) == []


def test_the_example_scheduler_is_under_fifty_lines() -> None:
    assert len((ROOT / "docs/example_plugin/turnout_example/sjf.py").read_text().splitlines()) < 50


def test_no_link_between_the_documents_is_dead() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_option_is_in_the_configuration_guide_with_its_default() -> None:
    found = plugins.collect(entry_points(group="turnout"))
    own = [c for c in found.choices.values() if c.package == "turnout"]
    options = {f"{c.slot}.{name}": default for c in own for name, _, default in c.options}
    for prefix, section in (("limits", Limits()), ("server", ServerConfig()), ("sampling", SamplingConfig())):
        options |= {f"{prefix}.{field.name}": getattr(section, field.name) for field in fields(section)}
    guide = (ROOT / "docs" / "config.md").read_text()
    for key, default in options.items():
        row = next((line for line in guide.splitlines() if line.startswith(f"| `{key}`")), "")
        assert f"| `{'null' if default is None else default}` |" in row, f"{key}={default}: {row!r}"
    for choice in own:
        row = next(line for line in guide.splitlines() if line.startswith(f"| `{choice.slot}` "))
        assert f"`{choice.name}`" in row


def test_everything_a_component_may_offer_besides_its_contract_is_in_the_plugin_guide() -> None:
    guide = (ROOT / "docs" / "plugins.md").read_text()
    for name in optional.__all__:
        kind = getattr(optional, name)
        if getattr(kind, "_is_protocol", False):
            assert any(f"`{member}" in guide for member in members(kind)), f"{name}: none of {sorted(members(kind))}"


def test_every_version_of_every_contract_is_in_the_page_of_changes() -> None:
    page = (ROOT / "docs" / "contracts.md").read_text()
    for slot, current in hooks.CONTRACTS.items():
        assert current == 1 or f"| {slot} | {current} |" in page, f"{slot}: what did version {current} change?"
