"""Plants each fault in a copy of the sources, and writes down which test finds it.

    python tests/mutations/run.py                  all faults; the table in docs/testing.md is written anew
    python tests/mutations/run.py api sampling     of these kinds; nothing is written

A fault is first tried on the quick tests of its parts, then, where those pass, on the slow ones. A test that fails without
a fault too counts for nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- faults: make mutations -->", "<!-- end of faults -->"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "dist", "build")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)


def tried(tree: Path, *arguments: str) -> str | None:
    """The first test that fails in a tree, or None. Raises RuntimeError where no test ran."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--benchmark-disable", "-p", "no:cacheprovider", *arguments]
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False, timeout=1200)
    found = FAILED.search(done.stdout)
    if found is not None:
        return found.group(1)
    if done.returncode not in (0, 5):  # 5: nothing to run, for files without slow tests
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return None


def plant(fault: Fault, tree: Path) -> None:
    """Raises ValueError where the sources are not as the fault expects."""
    file = tree / fault.file
    source = file.read_text()
    if source.count(fault.before) != 1:
        raise ValueError(f"{fault.file} holds {source.count(fault.before)} times what {fault.name!r} changes")
    file.write_text(source.replace(fault.before, fault.after))


def finder(fault: Fault, tree: Path) -> tuple[str, str]:
    """(set, test) that finds the fault; ("", "") where none does."""
    original = (tree / fault.file).read_text()
    plant(fault, tree)
    try:
        for which, marked in (("quick", "not slow"), ("all", "slow")):
            if (test := tried(tree, "-m", marked, *fault.tests)) is not None:
                return which, test
        return "", ""
    finally:
        (tree / fault.file).write_text(original)


def table(found: list[tuple[Fault, str, str]]) -> str:
    rows = ["| kind | fault planted | found by | first test that fails |", "|---|---|---|---|"]
    for fault, which, test in found:
        by = {"quick": "`make test`", "all": "`make test-all`"}.get(which, "**nothing**")
        rows.append(f"| {fault.kind} | {fault.name} | {by} | {f'`{test}`' if test else ''} |")
    return "\n".join(rows)


def main(kinds: list[str]) -> int:
    chosen = [fault for fault in FAULTS if not kinds or fault.kind in kinds]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        for fault in chosen:
            began = time.monotonic()
            which, test = finder(fault, tree)
            print(
                f"{fault.kind}: {fault.name}: {which or 'NOTHING'} {test} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            found.append((fault, which, test))
        tests = sorted({test for _, _, test in found if test})
        failing = tried(tree, "-m", "", *tests) if tests else None
    if failing is not None:
        print(f"{failing} fails without a fault: the table is not written", file=sys.stderr)
        return 1
    if not kinds:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.split(END)[1]}")
    return 0 if all(which for _, which, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
