"""A recorded run, replayed, makes the same decisions: chunk for chunk, victim for victim."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from days import record_day
from grids import in_turn

from turnout.compose import plugins
from turnout.lab.record.replay import replay

SLOTS = ("scheduler", "preemption", "blocks")
NAMES = {slot: plugins.load().names(slot) for slot in SLOTS}
SEEDS = range(2)


@in_turn(**NAMES)
def test_every_policy_decides_the_same_again(tmp_path: Path, scheduler: str, preemption: str, blocks: str) -> None:
    victims = 0
    for seed in SEEDS:
        path = tmp_path / f"{seed}.jsonl"
        engine = record_day(path, seed, scheduler=scheduler, preemption=preemption, blocks=blocks)
        victims += engine.stats.preemptions_recompute + engine.stats.preemptions_swap
        result = replay(path)
        assert result.difference is None, str(result.difference)
        assert (result.num_steps, result.num_requests, result.stopped) == (engine._num_steps, 40, None)
    assert victims, "no day of these has a preemption: nothing is proven"


def test_another_process_decides_the_same_whatever_its_hash_seed(tmp_path: Path) -> None:
    """Orders of sets and of hashes have no say."""
    for scheduler in NAMES["scheduler"]:
        record_day(tmp_path / f"{scheduler}.jsonl", 7, scheduler=scheduler, preemption="swap")
    code = (
        "import sys; from turnout.lab.record.replay import replay\nfor f in sys.argv[1:]: print(replay(f).difference)"
    )
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == ["None"] * len(files)


Line = dict[str, Any]


def changed(path: Path, change: Callable[[Line], None], which: Callable[[Line], bool]) -> None:
    """Change the first line that `which` holds for."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(next(line for line in lines if which(line)))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def two_chunks(line: Line) -> bool:
    return len(line.get("chunks", ())) > 1


@pytest.mark.parametrize(
    ("what", "which", "change"),
    [
        ("chunks", two_chunks, lambda line: line["chunks"].reverse()),
        ("chunks", two_chunks, lambda line: line["chunks"].pop()),
        ("preempted", lambda line: line.get("preempted"), lambda line: line["preempted"].clear()),
        ("blocks_free", two_chunks, lambda line: line.update(blocks_free=1000)),
        ("finished", lambda line: line.get("finished"), lambda line: line["finished"].pop()),
    ],
)
def test_the_first_difference_is_shown(tmp_path: Path, what: str, which: Any, change: Any) -> None:
    path = tmp_path / "day.jsonl"
    record_day(path, 1)
    changed(path, change, which)
    where = next(
        line["step"] for line in map(json.loads, path.read_text().splitlines()) if "step" in line and which(line)
    )
    difference = replay(path).difference
    assert difference is not None and difference.what == what
    assert str(difference).startswith(f"step {difference.step}, {what}: recorded ") and difference.step <= where
