"""A stranger's package, installed beside ours into a fresh environment, is listed, proven and served. Nothing of ours is
edited for it."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from conftest import Served

ROOT = Path(__file__).parents[2]


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `turnout` of an environment with our package and the example, and the running one's dependencies."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    for package in (ROOT, ROOT / "docs" / "example_plugin"):
        run(sys.executable, "-m", "pip", "--python", python, "install", *offline, package)
    return folder / "bin" / "turnout"


def test_it_is_listed_with_its_package_version_and_options(fresh: Path) -> None:
    listed = run(fresh, "plugins")
    assert "turnout-example 0.1.0" in listed
    assert "scheduler.ageing=64.0  (float)" in listed and "attention.every=0  (int)" in listed


def test_it_keeps_its_contracts(fresh: Path) -> None:
    assert "0 failed" in run(fresh, "plugins", "check", "scheduler=sjf")
    assert "0 failed" in run(fresh, "plugins", "check", "attention=counted")
    assert "0 failed" in run(fresh, "plugins", "check", "quant=nf4")


def test_its_preset_composes(fresh: Path) -> None:
    composed = run(fresh, "serve", "experiment=bursty", "--cfg", "job")
    assert "ageing: 16" in composed


def test_it_serves(fresh: Path, serve: Callable[..., Served]) -> None:
    overrides = ("scheduler=sjf", "scheduler.ageing=3", "attention=counted", "attention.every=1", "quant=nf4")
    served = serve("dtype=float32", *overrides, command=fresh).ready()
    assert "Paris" in str(served.complete("The capital of France is"))
    info = served.http.get("/server_info").text
    assert "turnout-example" in info
    assert "counted: " in served.output
    assert served.stop() == 0
