"""A real server on a free port, started by the console script as a user would."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

TURNOUT = Path(sysconfig.get_path("scripts")) / "turnout"


class Served:
    """`turnout serve` under test."""

    def __init__(self, *overrides: str, command: Path = TURNOUT, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `close`
        args = [str(command), "serve", f"server.port={self.port}", *overrides]
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        if "PYTEST_XDIST_WORKER" in os.environ:
            env["OMP_NUM_THREADS"] = "1"  # a second one would wait for another test's core
        self.process = subprocess.Popen(
            args, stdout=self.log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def ready(self, seconds: float = 120) -> Served:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"not ready (exit code {self.process.poll()}):\n{self.output}")

    @property
    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def complete(self, prompt: object, **fields: object) -> dict[str, object]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12} | fields
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = 60) -> int:
        """The exit code. Nothing of it may be left."""
        family = [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True))]
        self.process.send_signal(how)
        code = self.process.wait(seconds)
        time.sleep(0.2)
        left = [pid for pid in family if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        assert not left, f"processes {left} outlived the server"
        return code

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self.log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serve(smollm2: str) -> Iterator[Callable[..., Served]]:
    """`serve("scheduler=fcfs", …)`: started, not yet ready; ended after the test whatever happens."""
    started: list[Served] = []

    def start(*overrides: str, **options: object) -> Served:
        started.append(Served(*overrides, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.fixture(scope="module")
def server(smollm2: str) -> Iterator[Served]:
    """One server for the tests of a module, all defaults but the type."""
    served = Served("dtype=float32")
    try:
        yield served.ready()
    finally:
        served.close()
