"""What this process may use of the machine: memory and processors, by control groups (v1 and v2), limits and affinity.

It knows no model. In a container the machine's own figures say nothing: whoever goes by them is killed, or throttled.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # bytes from which a limit of v1 means none


class Files(NamedTuple):
    """The names of one version's files."""

    limit: str
    used: str
    kept: tuple[str, str]  # entries of memory.stat: files the kernel keeps in memory until others need the room


V1 = Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
V2 = Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def free_memory(root: Path = ROOT, own: Path = OWN) -> int:
    """Bytes this process may still take: the machine's, or less where a group it is in, or a limit of its own, says so."""
    import psutil

    free: int = psutil.virtual_memory().available
    for files, controller in ((V2, ""), (V1, "memory")):
        for group in _groups(root, own, controller):
            limit, used = _number(group / files.limit), _number(group / files.used)
            if limit is not None and used is not None and limit < UNLIMITED:
                free = min(free, limit - used + _kept(group, files))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:  # ulimit -v: addresses, not memory, so what libraries reserve counts too
        free = min(free, limit - psutil.Process().memory_info().vms)
    return max(free, 0)


def processors(root: Path = ROOT, own: Path = OWN) -> tuple[int, str]:
    """Threads that can compute at the same time, at least 1, and what says so. A quota's fraction of a core is no thread:
    one that must wait for the next period holds up the others at every product."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    why = f"{allowed} of {os.cpu_count()} processors"
    for quota in _quotas(root, own):
        if max(1, int(quota)) < allowed:
            allowed, why = max(1, int(quota)), f"a CPU quota of {quota:g}"
    return allowed, why


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Of the groups this process is in, those that have one, in cores."""
    for group in _groups(root, own, ""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)
    for group in _groups(root, own, "cpu"):
        quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us:
            yield quota_us / period_us


def _groups(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """Folders of the group this process is in and of those around it; `controller` "": those of v2. A container often sees
    its own group as the root, under a path that it does not have."""
    path = "/"
    for line in _text(own).splitlines():
        _, names, place = line.split(":", 2)
        if controller in names.split(","):
            path = place
    top = root / controller if controller else root
    group = top / path.strip("/")
    for folder in (group, *group.parents):
        yield folder
        if folder == top:
            return


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:
        return None  # no such file, or "max"


def _kept(group: Path, files: Files) -> int:
    entries = [line.split() for line in _text(group / "memory.stat").splitlines()]
    stat = {entry[0]: entry[1] for entry in entries if len(entry) == 2}
    return sum(int(stat[name]) for name in files.kept if stat.get(name, "").isdigit())
