"""The table of what each attention backend can do, made of their capabilities, and the page it stands in.

python tests/helpers/support_table.py docs/attention.md      writes the table anew
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path

from turnout.compose import plugins
from turnout.compose.negotiate import in_order
from turnout.compose.plugins import Plugins
from turnout.core.interfaces import Capabilities

BEGIN, END = "<!-- support: python tests/helpers/support_table.py -->", "<!-- end of support -->"
HEAD = (
    *("backend", "devices", "dtypes", "head sizes", "block sizes", "8-bit caches", "window", "softcap", "sinks"),
    *("value sizes", "graphs", "batch invariant"),
)
FEATURES = ("window", "softcap", "sinks", "v_head_dim", "graphs", "batch_invariant")


def support(found: Plugins, package: str = "turnout") -> str:
    """The order of `attention=auto` and the table of a package's backends, as Markdown."""
    backends = {c.name: c for c in found.choices.values() if c.slot == "attention" and c.package == package}
    able = {name: getattr(choice.component, "capabilities", None) for name, choice in sorted(backends.items())}
    rows = [HEAD, ("---",) * len(HEAD)]
    rows += [(f"`{name}`", *_cells(can)) for name, can in able.items() if isinstance(can, Capabilities)]
    taking_part = [backend for backend in backends.values() if isinstance(able[backend.name], Capabilities)]
    orders = [
        f"- on `{device}`: {', '.join(f'`{backend.name}`' for backend in in_order(taking_part, device))}"
        for device in ("cpu", "cuda")
    ]
    table = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(("`attention=auto` takes the first of these that can serve the model:", "", *orders, "", *table))


def renewed(page: str, found: Plugins) -> str:
    """The page with its table as it must be. Raises ValueError where the page has no place for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{support(found)}\n{END}{after}"


def _cells(can: Capabilities) -> Iterator[str]:
    yield _words(can.devices)
    yield _words(None if can.dtypes is None else {str(dtype).removeprefix("torch.") for dtype in can.dtypes})
    yield _numbers(can.head_dims)
    yield _numbers(can.block_sizes)
    yield _words(can.cache_dtypes) or "none"
    yield from ("yes" if getattr(can, name) else "no" for name in FEATURES)


def _words(values: Collection[str] | None) -> str:
    return "any" if values is None else ", ".join(f"`{value}`" for value in sorted(values))


def _numbers(values: Collection[int] | None) -> str:
    """A list; a range with its step where there are more than four at equal distances."""
    if values is None:
        return "any"
    found = sorted(values)
    steps = {b - a for a, b in pairwise(found)}
    if len(found) > 4 and len(steps) == 1:
        return f"{found[0]} to {found[-1]} in steps of {steps.pop()}"
    return ", ".join(map(str, found))


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text(), plugins.load()))
