"""What a process may use: the tightest of the machine, the groups around it, and its own limits."""

from __future__ import annotations

import os
import resource
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from turnout.plugins.runner import allowance, model
from turnout.plugins.runner.allowance import free_memory, processors

GROUP = "docker/abc"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 bytes and 8 processors."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=10_000))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


Write = Callable[..., None]


@pytest.fixture(params=["v1", "v2", "v1 seen from inside"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Write:
    """`write("docker", memory=…, used=…, quota=…)` limits a group; this process is in docker/abc."""
    version = request.param[:2]
    inside = request.param.endswith("inside")  # of a container: its own group is the root of what it sees
    lines = {"v1": f"4:memory:/{GROUP}\n1:cpu,cpuacct:/{GROUP}\n0::/\n", "v2": f"0::/{GROUP}\n"}[version]
    (tmp_path / "own").write_text(lines)

    def put(folder: Path, name: str, content: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{content}\n")

    def limit(
        group: str, *, memory: int | None = None, used: int = 0, kept: int = 0, quota: float | None = None
    ) -> None:
        group = "" if inside else group
        if version == "v2":
            folder = tmp_path / group
            put(folder, "memory.max", "max" if memory is None else memory)
            put(folder, "memory.current", used)
            put(folder, "memory.stat", f"anon 5\ninactive_file {kept}\nactive_file 0")
            put(folder, "cpu.max", "max 100000" if quota is None else f"{int(quota * 100_000)} 100000")
            return
        put(tmp_path / "memory" / group, "memory.limit_in_bytes", 9223372036854771712 if memory is None else memory)
        put(tmp_path / "memory" / group, "memory.usage_in_bytes", used)
        put(tmp_path / "memory" / group, "memory.stat", f"total_inactive_file {kept}\ntotal_active_file 0")
        put(tmp_path / "cpu" / group, "cpu.cfs_quota_us", -1 if quota is None else int(quota * 100_000))
        put(tmp_path / "cpu" / group, "cpu.cfs_period_us", 100_000)

    return limit


@pytest.mark.usefixtures("machine")
class TestGroups:
    @pytest.mark.parametrize("group", ["", "docker", GROUP])
    def test_a_groups_memory_limit_counts_at_any_height(self, write: Write, tmp_path: Path, group: str) -> None:
        write(group, memory=5000, used=2000, kept=500)
        assert free_memory(tmp_path, tmp_path / "own") == 3500

    def test_over_its_limit_it_leaves_nothing_and_never_less(self, write: Write, tmp_path: Path) -> None:
        write(GROUP, memory=1000, used=1200)
        assert free_memory(tmp_path, tmp_path / "own") == 0

    def test_without_a_limit_both_are_the_machines(self, write: Write, tmp_path: Path) -> None:
        write(GROUP)
        for root in (tmp_path, tmp_path / "missing"):
            assert free_memory(root, tmp_path / "own") == 10_000
            assert processors(root, tmp_path / "own") == (8, "8 of 8 processors")

    @pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (1.0, 1), (1.9, 1), (3.0, 3), (64.0, 8)])
    def test_threads_stay_within_a_cpu_quota(self, write: Write, tmp_path: Path, quota: float, threads: int) -> None:
        write(GROUP, quota=quota)
        allowed, why = processors(tmp_path, tmp_path / "own")
        assert allowed == threads
        assert (why == f"a CPU quota of {quota:g}") == (threads < 8)


@pytest.mark.usefixtures("machine")
def test_a_limit_on_addresses_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(vms=600))
    monkeypatch.setattr("psutil.Process", lambda: process)
    for limit, free in ((1000, 400), (500, 0), (resource.RLIM_INFINITY, 10_000)):
        monkeypatch.setattr(allowance.resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert free_memory(tmp_path, tmp_path / "own") == free


@pytest.mark.usefixtures("machine")
def test_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert processors(tmp_path, tmp_path / "own") == (1, "1 of 8 processors")


@pytest.mark.parametrize(
    ("asked", "allowed", "before", "after"),
    [("", 2, 4, 2), ("", 8, 4, 4), ("4", 1, 4, 4)],
    ids=["quota", "room", "asked"],
)
def test_the_runner_lowers_the_threads_and_says_so(
    monkeypatch: pytest.MonkeyPatch, asked: str, allowed: int, before: int, after: int
) -> None:
    threads = [before]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(model, "processors", lambda: (allowed, "a CPU quota"))
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    said = model._threads()
    assert threads[-1] == after and f"computes on {after} threads" in said
    assert ("OMP_NUM_THREADS" in said) == bool(asked)
