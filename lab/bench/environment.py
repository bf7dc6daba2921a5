"""Where and on what it was measured: everything that may explain why another machine, or another day, gives other numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from turnout.compose import plugins


def environment() -> dict[str, Any]:
    """Plain values. Load averages are those of now: ask before measuring."""
    import psutil
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "versions": plugins.versions(),
        "git": _git(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git() -> str | None:
    """The commit of this source, `+` where it was changed since; None: it is no checkout."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None or git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # a checkout of something else that this is installed in
    return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
