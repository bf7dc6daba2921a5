"""The generator's process from outside: start it, hear its samples, end it. And what it could do at most.

A load is made in a process of its own so that measuring and what is measured do not wait for each other.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, Self

from turnout.lab.bench.client import LoadRequest
from turnout.lab.bench.prompts import PromptModel
from turnout.lab.bench.sample import Sample
from turnout.lab.simulate.measure import Spread
from turnout.lab.workload.synthetic import Poisson

LEAVE = 5.0  # seconds a process has to be gone
PROBES = 200  # requests to measure the generator with


class GeneratorResult(NamedTuple):
    """What came of a load."""

    samples: list[Sample]
    seconds: float  # to the last answer
    last_planned: float
    fingerprint: str
    cut: bool  # the limit of time left requests unsent
    num_cut: int  # prompts that were too long
    whole: bool  # False: it was interrupted


@contextmanager
def child(module: str) -> Iterator[subprocess.Popen[bytes]]:
    """`main` of a module in a process whose standard input and output are here. It hears no Ctrl-C and is gone at the end."""
    command = [sys.executable, "-P", "-c", f"from turnout.lab.bench.{module} import main; main()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(LEAVE)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was not sent is not missed
                pipe.close()


class Generator:
    """The process that makes loads; a context, after which it is gone."""

    def __enter__(self) -> Self:
        self._held = ExitStack()
        process = self._held.enter_context(child("client"))
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout
        pickle.dump(sys.path, self._to)
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def run(self, job: LoadRequest, on_progress: Callable[[int], None] = lambda finished: None) -> GeneratorResult:
        """Make the load and wait for its end, or for Ctrl-C: no other can follow then. Raises ValueError for recorded prompts
        that are not this model's, RuntimeError when the generator died."""
        samples: list[Sample] = []
        end: dict[str, Any] | None = None
        try:
            pickle.dump(job, self._to)
            self._to.flush()
            while end is None:
                message = pickle.load(self._from)
                if isinstance(message, Sample):
                    samples.append(message)
                    on_progress(len(samples))
                else:
                    end = message
        except KeyboardInterrupt:
            self._held.close()
        except (EOFError, BrokenPipeError):
            code = self._process.wait(LEAVE)
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RuntimeError(f"the process that makes the load died: {reason}") from None
        if end is not None and "wrong" in end:
            raise ValueError(end["wrong"])
        whole = end is not None
        last = max((sample.planned for sample in samples), default=0.0)
        end = end or {"last_planned": last, "fingerprint": "", "cut": False, "num_cut": 0}
        samples.sort(key=lambda sample: sample.sent)
        seconds = max((sample.ended or 0.0 for sample in samples), default=0.0)
        return GeneratorResult(
            samples, seconds, end["last_planned"], end["fingerprint"], end["cut"], end["num_cut"], whole
        )


def limits(generator: Generator, clients: int) -> dict[str, float]:
    """What the generator does at most, against a server that computes nothing: requests a second with so many clients, events a
    second, and the latency it adds to a single request, seconds."""
    with child("echo") as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        job = LoadRequest(url, _probe(1), PromptModel(32_000, 100_000), "echo", 0, clients, clients)
        many = generator.run(job)
        events = generator.run(replace(job, workload=_probe(64)))
        single = generator.run(replace(job, clients=1, seats=1))
    added = Spread()
    for sample in single.samples[1:]:  # the first one opens the connection
        added.add(sample.ttft)
    return {
        "clients": clients,
        "requests": len(many.samples) / many.seconds,
        "events": 64 * len(events.samples) / events.seconds,
        "added_p50": added.quantile(0.5),
        "added_p99": added.quantile(0.99),
    }


def _probe(output: int) -> Poisson:
    return Poisson(num_requests=PROBES, prompt=100, output=output)
