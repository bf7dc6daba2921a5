"""One point of a benchmark: build or find what is measured, warm up, put the load on it several times, sum up."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from turnout.compose.plugins import options_of
from turnout.core.engine import Engine
from turnout.lab.bench.client import LoadRequest
from turnout.lab.bench.config import BenchConfig
from turnout.lab.bench.engine import EngineLoad
from turnout.lab.bench.generator import Generator, limits
from turnout.lab.bench.load import First, OfferedLoad
from turnout.lab.bench.prompts import PromptModel, Prompts
from turnout.lab.bench.remote import ORIGIN, ServedModel, counters
from turnout.lab.bench.sample import Sample
from turnout.lab.bench.summary import over_runs, summary
from turnout.lab.simulate.config import WORKLOADS
from turnout.lab.workload.arrivals import Workload

Values = dict[str, Any]
OnProgress = Callable[[str, int], None]  # (what is being done, requests answered)
CLIENTS = 16  # that the generator is measured with, where no number of them is asked for
COUNTED = ("num_steps", "preemptions_recompute", "preemptions_swap", "recomputed_tokens", "cached_tokens")


class Run(NamedTuple):
    """What came of a load, wherever it ran."""

    samples: Sequence[Sample]
    seconds: float
    last_planned: float
    cut: bool
    num_cut: int
    whole: bool


class Subject(Protocol):
    """What is measured."""

    seats: int  # requests it runs at once; 0: unknown
    origin: Values  # what it is made of

    def run(
        self, workload: Workload | First, number: int, clients: int | None, limit: float, on_progress: OnProgress
    ) -> Run:
        """Put a load on it. Each `number` has prompts of its own."""
        ...

    def counters(self) -> Mapping[str, Any]:
        """Its own, which only grow; empty: it has none."""
        ...

    def generator(self) -> Values:
        """What is known of the generator's part in the numbers."""
        ...


class EngineSubject:
    """An engine in this process."""

    def __init__(
        self,
        engine: Engine,
        temperature: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        info = engine.info
        self._engine, self._temperature, self._clock, self._sleep = engine, temperature, clock, sleep
        self._model = PromptModel(info.vocab_size, min(info.max_model_len, info.capacity))
        self.seats = info.max_num_seqs
        self.origin: Values = {name: getattr(info, name) for name in ORIGIN}
        self._share: list[float] = []

    def run(
        self, workload: Workload | First, number: int, clients: int | None, limit: float, on_progress: OnProgress
    ) -> Run:
        load, prompts = OfferedLoad(workload.arrivals(1.0, self.seats), clients, limit), Prompts(self._model, number)
        ran = EngineLoad(
            self._engine,
            load,
            prompts,
            temperature=self._temperature,
            salt=f"run {number}",
            clock=self._clock,
            sleep=self._sleep,
            on_progress=lambda finished: on_progress("", finished),
        ).run()
        if ran.seconds and number:
            self._share.append(ran.generating / ran.seconds)
        return Run(ran.samples, ran.seconds, load.last_planned, load.cut, prompts.num_cut, ran.whole)

    def counters(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self._engine.stats)

    def generator(self) -> Values:
        return {"where": "between the engine's steps", "share_of_time": max(self._share, default=0.0)}


class ServerSubject:
    """A server, asked by a process of its own."""

    def __init__(self, served: ServedModel, config: BenchConfig, generator: Generator, known: Values) -> None:
        """`known`: the generator's limits, where they were measured."""
        self._served, self._config, self._generator, self._known = served, config, generator, known
        self.seats, self.origin = served.seats, served.origin

    def run(
        self, workload: Workload | First, number: int, clients: int | None, limit: float, on_progress: OnProgress
    ) -> Run:
        served, options = self._served, self._config.remote
        job = LoadRequest(
            served.url,
            workload,
            served.model,
            served.name,
            number,
            self.seats,
            clients,
            limit,
            self._config.temperature,
            options.timeout,
            options.api_key,
            served.ours,
            options.ignore_eos,
        )
        ran = self._generator.run(job, lambda finished: on_progress("", finished))
        self.origin.setdefault("fingerprint", ran.fingerprint)
        return Run(ran.samples, ran.seconds, ran.last_planned, ran.cut, ran.num_cut, ran.whole)

    def counters(self) -> Mapping[str, Any]:
        return counters(self._served.url, self._config.remote) if self._served.ours else {}

    def generator(self) -> Values:
        return {"where": "a process of its own, over HTTP"} | self._known


class Calibration:
    """The generator's limits by number of clients, measured once."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, float]] = {}

    def of(self, generator: Generator, config: BenchConfig, on_progress: OnProgress) -> Values:
        """Empty where they are not asked for."""
        clients = config.concurrency or CLIENTS
        if not config.remote.calibrate:
            return {}
        if clients not in self._known:
            on_progress("measuring the generator itself", 0)
            self._known[clients] = limits(generator, clients)
        return {"limits": self._known[clients]}


def measured(subject: Subject, config: BenchConfig, on_progress: OnProgress) -> Values:
    """Everything of one point. `interrupted` is true where Ctrl-C ended it; then it is what was measured so far.

    Raises ValueError for a load that nobody can make.
    """
    workload: Workload = config.workload
    clients, limit = config.concurrency, math.inf if config.max_seconds is None else config.max_seconds
    if not (subject.seats or clients) and getattr(workload, "rate", 0) is None:
        raise ValueError(
            "the server does not say how many requests it runs at once: give concurrency, or workload.rate"
        )
    subject.seats = subject.seats or clients or 1
    load = _load(config, subject.seats)
    open_loop = load["kind"].startswith("open")
    notes: dict[str, None] = {}
    runs: list[Values] = []
    interrupted = False
    if config.warmup:
        on_progress("warming up", 0)
        interrupted = not subject.run(First(workload, config.warmup), 0, config.warmup, math.inf, on_progress).whole
    for number in range(1, config.repetitions + 1):
        if interrupted:
            break
        on_progress(f"repetition {number} of {config.repetitions}", 0)
        before = subject.counters()
        run = subject.run(workload, number, clients, limit, on_progress)
        after, interrupted = subject.counters(), not run.whole
        if run.samples:
            counted = {name: after[name] - before[name] for name in COUNTED if name in after}
            values = summary(run.samples, run.seconds, run.last_planned, config.target, open_loop=open_loop)
            runs.append(values | {"engine": counted, "interrupted": interrupted})
        notes |= dict.fromkeys([*_notes(run, config, subject), *workload.notes()])
    median, extent = over_runs(runs) if runs else ({}, {})
    return {
        "origin": subject.origin,
        "load": load,
        "generator": subject.generator(),
        "repetitions": runs,
        "median": median,
        "range": extent,
        "interrupted": interrupted,
        "notes": list(notes),
    }


def _notes(run: Run, config: BenchConfig, subject: Subject) -> list[str]:
    found = []
    if run.cut:
        found.append(f"max_seconds={config.max_seconds:g}: what the workload has beyond it was not sent")
    if run.num_cut:
        found.append(
            f"the ends of {run.num_cut} prompts of each repetition were cut off: the context has no room for them"
        )
    short = sum(s.num_said < s.num_wanted for s in run.samples if s.error is None)
    if short:
        found.append(f"{short} answers were shorter than asked for: the server does not ignore the end of a text")
    return found


def _load(config: BenchConfig, seats: int) -> Values:
    """What was asked, in words and options."""
    workload = config.workload
    name = next(name for name, kind in WORKLOADS.items() if kind is type(workload))
    rate = getattr(workload, "rate", None)
    if config.concurrency is not None:
        kind = f"closed loop, {config.concurrency} clients"
    elif name == "trace":
        kind = f"open loop, recorded arrivals at {workload.speed:g} times their speed"
    elif name == "interference":
        kind = f"{workload.streams} clients in a closed loop, a document every {workload.every:g} s"
    else:
        kind = f"closed loop, {seats} clients" if rate is None else f"open loop, {rate:g} requests a second"
    return {
        "kind": kind,
        "workload": {"name": name, "options": options_of(workload)},
        "max_seconds": config.max_seconds,
        "warmup": config.warmup,
        "repetitions": config.repetitions,
        "temperature": config.temperature,
        "steady_window": "from the first answer to the last request sent",
    }
