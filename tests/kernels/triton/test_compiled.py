"""Every Triton kernel compiles for Ampere and Hopper as it is launched by default, with or without a GPU here.

That is all it shows: that no numbers are wrong there only a GPU can (`tests/gpu/`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALLEST = 99 * 1024  # bytes of shared memory a block can have on any GPU of compute capability 8.0 or above
PRODUCTS = {"attend", "_product"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_fit_the_gpu_and_use_its_matrix_units(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "helpers" / "compiling.py", str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["name"] for kernel in made} >= PRODUCTS | {"store", "reduce", "_encode"}
    assert [kernel for kernel in made if kernel["shared"] > SMALLEST] == []
    exact = [kernel for kernel in made if kernel["name"] in PRODUCTS and not kernel["matrix_units"]]
    assert len(exact) == (2 if capability == 90 else 0), "only float32, tried on one of them, is computed without"
