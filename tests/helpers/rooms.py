"""Which file of ours imports which, and the picture of it in the tour. It reads sources and imports nothing of ours.

    python tests/helpers/rooms.py       draws the picture in docs/tour.md anew

Every import counts for the rooms: in functions and for type checkers too. A package that is named only on the way to one of
its modules does not.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs" / "tour.md"
FOLDERS = ("core", "compose", "kernels", "plugins", "conf", "testing", "server", "lab")
BEGIN, END = "<!-- rooms: python tests/helpers/rooms.py -->", "<!-- end of rooms -->"
Arrows = Mapping[str, frozenset[str]]

# Who may import whom. What a room reaches through others counts as if it imported it.
ROOMS: dict[str, tuple[str, ...]] = {
    "core": (),
    "kernels": (),
    "conf": (),
    "compose": ("core",),
    "testing": ("core", "compose"),
    "plugins": ("core", "kernels"),
    "server/text": ("core", "compose"),
    "server/steplog": ("core",),
    "server/config": ("core", "compose"),
    "server/engine": ("core", "compose", "server/config", "server/text", "server/steplog"),
    "server/api": ("core", "compose", "server/config", "server/text", "server/steplog", "server/engine"),
    "server/cli": (
        *("core", "compose", "testing"),
        *("server/config", "server/text", "server/steplog", "server/engine", "server/api"),
    ),
    "lab": (
        *("core", "compose", "testing"),
        *("server/config", "server/text", "server/steplog", "server/engine", "server/api", "server/cli"),
    ),
}


@cache
def files() -> dict[str, Path]:
    """Our modules by their dotted names."""
    found = {}
    for file in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        parts = ("turnout", *file.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(module: str, typed: bool = True) -> Iterator[tuple[str, str | None]]:
    """Every (module, name) that a file imports anywhere; name None: the module itself. Without those that are for type
    checkers alone, unless `typed`."""
    nodes: list[ast.AST] = [ast.parse(files()[module].read_text())]
    while nodes:
        node = nodes.pop()
        if not typed and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


@cache
def arrows(typed: bool = True) -> Arrows:
    """Each module of ours and those of ours that it imports; `typed` as for `imports`."""
    known = files()
    found = {}
    for module in known:
        named = {
            f"{source}.{name}" if f"{source}.{name}" in known else source for source, name in imports(module, typed)
        }
        found[module] = frozenset((named & known.keys()) - {module})
    return found


def room(module: str) -> str | None:
    """The room a module stands in; None for the doors of packages that hold rooms (`turnout.server`)."""
    path = module.split(".")[1:]
    return next((name for name in ("/".join(path[:2]), path[0]) if name in ROOMS), None)


def ways(start: str) -> dict[str, list[str]]:
    """Everything a module reaches, each with a shortest chain of imports to it."""
    found, queue = {start: [start]}, deque([start])
    while queue:
        module = queue.popleft()
        for target in sorted(arrows()[module] - found.keys()):
            found[target] = [*found[module], target]
            queue.append(target)
    return found


def circles(graph: Arrows) -> list[list[str]]:
    """Groups whose members reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, stack = set[str](), list(graph[start])
        while stack:
            if (node := stack.pop()) not in seen:
                seen.add(node)
                stack += graph[node]
        reach[start] = seen
    together = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return [list(group) for group in sorted(together)]


def between_rooms() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {name: set() for name in ROOMS}
    for module, targets in arrows().items():
        if (here := room(module)) is not None:
            found[here] |= {there for target in targets if (there := room(target)) not in (None, here)}
    return {name: frozenset(targets) for name, targets in found.items()}


def picture() -> str:
    """The rooms in floors: each imports only from floors below its own."""
    graph = {name: targets for name, targets in between_rooms().items() if name != "conf"}
    lines, wide = [], max(map(len, graph))
    for level in sorted(set(map(floor, graph)), reverse=True):
        for name in sorted(name for name in graph if floor(name) == level):
            below = sorted(graph[name], key=lambda target: (-floor(target), target))
            lines.append(f"{level}  {name:<{wide}} {'──▶ ' + ', '.join(below) if below else '    nothing of ours'}")
    return "\n".join(("```", *lines, "```"))


def floor(name: str) -> int:
    """How high a room stands, by the rules."""
    return 1 + max(map(floor, ROOMS[name]), default=-1)


def renewed(page: str) -> str:
    """The page with the picture as it must be. Raises ValueError where the page has no place for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{picture()}\n{END}{after}"


if __name__ == "__main__":
    TOUR.write_text(renewed(TOUR.read_text()))
