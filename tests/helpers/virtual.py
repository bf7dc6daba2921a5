"""An engine whose time is made up: the fake model, and a clock that each step moves on by a linear law."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from turnout.core import Request, Sampling, Step
from turnout.core.cost import Load
from turnout.core.engine import Engine
from turnout.core.model import Result
from turnout.testing import TokenCacheRunner, make_engine

LAW = (4e-3, 4e-4, 1e-8, 5e-4, 1e-8, 2e-4)  # seconds: a step, prompt token, its keys, stream, its keys, block moved


class Clock:
    """Seconds, as told."""

    def __init__(self, now: float = 1.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def plus(load: Load, start: int, num_tokens: int) -> Load:
    """With one more chunk of `num_tokens` tokens from position `start`: the rule, written out."""
    if num_tokens == 1:
        return load._replace(decodes=load.decodes + 1, decode_keys=load.decode_keys + start + 1)
    keys = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return load._replace(prefill_tokens=load.prefill_tokens + num_tokens, prefill_keys=load.prefill_keys + keys)


class TimedRunner(TokenCacheRunner):
    """The fake model's runner, which takes its time by the clock."""

    def __init__(self, clock: Clock, law: Sequence[float], *sizes: int) -> None:
        super().__init__(*sizes)
        self.clock, self.law = clock, law

    def run(self, step: Step) -> Result:
        load = Load(moved_blocks=len(step.swap_out) + len(step.swap_in))
        for chunk in step.chunks:
            load = plus(load, chunk.start, chunk.num_tokens)
        self.clock.now += sum(seconds * count for seconds, count in zip(self.law, (1, *load), strict=True))
        return super().run(step)


def timed_engine(scheduler: Any, law: Sequence[float] = LAW, **options: Any) -> tuple[Engine, Clock]:
    clock = Clock()
    engine = make_engine(scheduler, clock=clock, **options)
    info, stats = engine.info, engine.stats
    engine._runner = TimedRunner(clock, law, info.num_blocks, info.block_size, stats.host_blocks)
    return engine, clock


def ask(
    name: str,
    num_tokens: int,
    max_tokens: int,
    *,
    first: int = 0,
    priority: int = 0,
    arrived: float = 0.0,
    **labels: str,
) -> Request:
    """A request whose prompt counts up from `first`."""
    prompt = [(first + i) % 900 for i in range(num_tokens)]
    sampling = Sampling(0, max_tokens=max_tokens)
    return Request(name, prompt, sampling, arrived=arrived, priority=priority, labels=labels)


def drive(
    engine: Engine, requests: Iterable[Request], watch: Callable[[], object] = lambda: None, steps: int = 100_000
) -> dict[str, list[float]]:
    """Add each request once its `arrived` has come, and step to the end. Returns when each got its tokens."""
    clock, times = engine._clock, dict[str, list[float]]()
    todo = sorted(requests, key=lambda r: r.arrived)
    assert isinstance(clock, Clock)
    for _ in range(steps):
        if todo and not engine.busy:
            clock.now = max(clock.now, todo[0].arrived)
        while todo and todo[0].arrived <= clock.now:
            engine.add(todo.pop(0))
        if not engine.busy:
            return times
        for output in engine.step():
            times.setdefault(output.request_id, []).extend([clock.now] * len(output.tokens))
        watch()
    raise AssertionError(f"{len(engine.running)} run and {len(engine.waiting)} wait after {steps} steps")


def first_chunks(engine: Engine) -> list[str]:
    """The ids in the order in which requests were first computed."""
    runner: Any = engine._runner
    return list(dict.fromkeys(chunk.request.id for step in runner.steps for chunk in step.chunks))
