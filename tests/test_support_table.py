"""The table of backends in the attention guide is made of their capabilities."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
import support_table
from support_table import BEGIN, END, renewed

from turnout.compose import plugins
from turnout.core import Capabilities

GUIDE = Path(__file__).parents[1] / "docs" / "attention.md"


def test_the_guide_says_what_the_capabilities_say() -> None:
    page = GUIDE.read_text()
    remedy = "python tests/helpers/support_table.py docs/attention.md writes the table anew"
    assert renewed(page, plugins.collect(entry_points(group="turnout"))) == page, remedy


def test_every_backend_of_the_automatic_order_is_in_the_table() -> None:
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    ours = {c.name for c in plugins.load().choices.values() if c.slot == "attention" and c.package == "turnout"}
    for name in ours - {"auto"}:
        assert any(row.startswith(f"| `{name}` |") for row in rows), name


def test_sizes_are_listed_or_a_range() -> None:
    def cells(**claimed: object) -> list[str]:
        return list(support_table._cells(Capabilities(**claimed)))  # type: ignore[arg-type]

    assert cells()[:5] == ["any", "any", "any", "any", "none"] and set(cells()[5:]) == {"no"}
    found = cells(head_dims=frozenset(range(8, 257, 8)), block_sizes=frozenset({16, 32, 64}), sinks=True)
    assert found[2:4] == ["8 to 256 in steps of 8", "16, 32, 64"] and found[7] == "yes"


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold the lines"):
        renewed(f"{END} {BEGIN}", plugins.load())
