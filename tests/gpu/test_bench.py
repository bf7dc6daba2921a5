"""The GPU benchmark itself, in miniature on the CPU: that it measures, counts and writes, not what the numbers are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def test_it_writes_a_row_for_every_backend_and_kind_of_cache(tmp_path: Path) -> None:
    asked = ["--device", "cpu", "--small", "--only", "torch", "--model", "none", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, HERE / "bench.py", *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["copy"] > 0 and report["matrix"] > 0
    kinds = {(row["what"], row["backend"], row["cache"]) for row in report["rows"]}
    assert kinds == {(what, "torch", form) for what in ("decode", "prefill") for form in ("auto", "fp8", "int8")}
    for row in report["rows"]:
        assert row["share"] == pytest.approx(row["rate"] / report["copy" if row["what"] == "decode" else "matrix"])
    decode = next(row for row in report["rows"] if row["what"] == "decode" and row["cache"] == "auto")
    read = 4 * 64 * 2 * 64 * 2 * 4  # requests, keys, heads, elements, keys and values, bytes of float32
    assert decode["rate"] * decode["seconds"] == pytest.approx(read)
    table = (tmp_path / "results.md").read_text()
    assert table.count("| decode | torch |") == table.count("| prefill | torch |") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_script_says_so_and_ends(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    run = ["bash", HERE / "run.sh", tmp_path / "out"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "torch sees no GPU here" in done.stderr
    assert not (tmp_path / "out").exists()
