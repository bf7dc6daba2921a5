"""Try a composition: on the engine, or in the simulator with a law of step times learned from the engine."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from turnout.compose.build import build_engine
from turnout.core.engine import Engine
from turnout.core.hooks import Hooks
from turnout.lab.bench.load import First
from turnout.lab.bench.measure import EngineSubject, Run
from turnout.lab.bench.summary import over_runs, summary
from turnout.lab.simulate.config import SimulateConfig, Target
from turnout.lab.simulate.latency import Fitted
from turnout.lab.simulate.loop import Simulation
from turnout.lab.tune.config import TuneConfig
from turnout.lab.tune.goal import BOUNDED, Outcome
from turnout.lab.tune.load import Same
from turnout.lab.workload.arrivals import Workload
from turnout.server.steplog.observe import recording

WARMUP = 4  # requests
RECORD_LIMIT = 2**30  # bytes

Make = Callable[[], TuneConfig]  # components have state: each trial gets new ones
OnProgress = Callable[[str, int], None]
Values = dict[str, Any]


class Measured(NamedTuple):
    """A run on the engine."""

    outcome: Outcome
    spread: tuple[float, float]  # least and most output tokens a second of the repetitions
    numbers: Values  # the median of every number


class Law(NamedTuple):
    """What the simulator knows of this engine."""

    latency: Fitted
    capacity: int  # tokens that the cache holds
    max_model_len: int
    median_error: float  # relative, of a step's time, on steps held out
    p90_error: float


class Trials:
    """Tries compositions. Building an engine and time itself are parameters, so that tests decide both."""

    def __init__(
        self,
        hooks: Hooks,
        on_progress: OnProgress,
        build: Callable[[TuneConfig], Engine] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._hooks, self._on_progress, self._clock, self._sleep = hooks, on_progress, clock, sleep
        self._build = build or (lambda config: build_engine(config, lambda stage, share: on_progress(stage, 0)))

    @contextmanager
    def engine(self, make: Make) -> Iterator[Engine]:
        """An engine, and afterwards the room it took."""
        engine = self._build(make())
        try:
            yield engine
        finally:
            del engine
            gc.unfreeze()  # building froze what was there
            gc.collect()

    def measure(self, make: Make) -> Measured:
        """What `on` measures, on a new engine."""
        with self.engine(make) as engine:
            return self.on(engine, make)

    def on(self, engine: Engine, make: Make) -> Measured:
        """Warm up, then run the load `repetitions` times. Raises ValueError when every request failed."""
        subject = EngineSubject(engine, 0.0, self._clock, self._sleep)
        self._run(subject, First(same(make(), engine), WARMUP), 0, WARMUP)
        runs = []
        for number in range(1, make().repetitions + 1):
            ran = self._run(subject, same(make(), engine), number)
            runs.append(summary(ran.samples, ran.seconds, ran.last_planned, Target(), open_loop=False))
        median, extent = over_runs(runs)
        if not median["requests.finished"]:
            raise ValueError(f"every request failed: {runs[0]['requests']['errors']}")
        p99 = {name: median[f"{name}.p99"] for name in BOUNDED}
        outcome = Outcome(median["throughput.output_tokens"], p99, extent["requests.failed"][1] == 0)
        least, most = extent["throughput.output_tokens"]
        return Measured(outcome, (least, most), median)

    def learn(self, make: Make, folder: Path) -> Law:
        """Record one run of the load and fit the law of its step times. Raises ValueError where too few steps were seen."""
        log = folder / "baseline.jsonl"
        with recording(self._hooks, str(log), RECORD_LIMIT) as recorder, self.engine(make) as engine:
            assert recorder is not None
            recorder.begin(engine.info)
            subject = EngineSubject(engine, 0.0, self._clock, self._sleep)
            self._run(subject, First(same(make(), engine), WARMUP), 0, WARMUP)
            self._run(subject, same(make(), engine), 1)
            info = engine.info
        law = Fitted(str(log))
        law.start(info.block_size)
        return Law(law, info.capacity, info.max_model_len, law.found.median_error, law.found.p90_error)

    def simulate(self, make: Make, law: Law, workload: Workload | None = None) -> Outcome:
        """The same load, or another, under the same memory in the simulator. Raises ValueError where nothing can run."""
        config = make()
        blocks = config.blocks
        if blocks.num_blocks is None:
            blocks.num_blocks = max(1, law.capacity // blocks.block_size)
        room = min(law.max_model_len, blocks.num_blocks * blocks.block_size)
        load = workload or Same(config.workload, config.clients, config.max_requests, room)
        config.limits.max_model_len = law.max_model_len
        simulated = SimulateConfig(
            config.scheduler,
            config.preemption,
            blocks,
            load,
            _Learned(law.latency),
            config.limits,
            Target(None, None),
        )
        record = Simulation(simulated, self._hooks).run()
        seconds = record.seconds or 1.0
        p99 = {name: getattr(record, name).quantile(0.99) for name in BOUNDED}
        return Outcome(record.stats.generated_tokens / seconds, p99, record.num_refused == 0)

    def _run(self, subject: EngineSubject, workload: Workload | First, number: int, clients: int | None = None) -> Run:
        ran = subject.run(workload, number, clients, math.inf, self._on_progress)
        if not ran.whole:
            raise KeyboardInterrupt
        return ran


def same(config: TuneConfig, engine: Engine) -> Same:
    """The workload for this engine and its simulation."""
    info = engine.info
    return Same(config.workload, config.clients, config.max_requests, min(info.max_model_len, info.capacity))


class _Learned:
    """A law that was fitted already. See Latency."""

    def __init__(self, law: Fitted) -> None:
        self.seconds, self.assumptions = law.seconds, law.assumptions

    def start(self, block_size: int) -> None: ...
