"""The load on an engine in this process: requests in, steps, outputs out, with no server between.

Requests are made before they are due, added between two steps and timed when a step has ended, so the generator takes time
from the engine; how much is measured and stated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from turnout.core.engine import Engine
from turnout.core.types import Finish, Output, Request, Sampling
from turnout.lab.bench.load import OfferedLoad, PlannedRequest
from turnout.lab.bench.prompts import Prompts
from turnout.lab.bench.sample import Sample
from turnout.lab.simulate.fairness import LABEL

NAP = 0.5  # seconds slept at most, so that Ctrl-C is heard


class EngineLoadResult(NamedTuple):
    """What came of a load."""

    samples: list[Sample]  # in the order they were sent
    seconds: float  # to the last answer
    generating: float  # seconds the generator took from the engine
    whole: bool  # False: it was interrupted


class EngineLoad:
    """One run. The clock is a parameter, so that tests decide what time it is."""

    def __init__(
        self,
        engine: Engine,
        load: OfferedLoad,
        prompts: Prompts,
        *,
        temperature: float = 0.0,
        salt: str = "",
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        on_progress: Callable[[int], None] = lambda finished: None,
    ) -> None:
        """`salt`: keeps recorded prompts from being found in a cache that an earlier run filled."""
        self._engine, self._load, self._prompts, self._salt = engine, load, prompts, salt
        self._temperature, self._clock, self._sleep, self._on_progress = temperature, clock, sleep, on_progress
        self._samples: dict[str, Sample] = {}
        self._said: dict[str, list[int]] = {}  # of requests that something may go on from
        self._num_ended = 0
        self._generating = 0.0

    def run(self) -> EngineLoadResult:
        """To the last answer, or to Ctrl-C. Raises ValueError for recorded prompts that are not this model's."""
        self._began = self._clock()
        try:
            self._loop()
        except KeyboardInterrupt:
            for sample in self._samples.values():
                if sample.ended is None:
                    self._engine.abort(self._name(sample.id))
            while self._engine.busy:
                self._engine.step()
            return self._ran(whole=False)
        return self._ran(whole=True)

    def _ran(self, *, whole: bool) -> EngineLoadResult:
        ended = [sample for sample in self._samples.values() if sample.ended is not None]
        return EngineLoadResult(
            ended, max((sample.ended or 0.0 for sample in ended), default=0.0), self._generating, whole
        )

    def _loop(self) -> None:
        engine, load = self._engine, self._load
        while True:
            now = self._clock() - self._began
            for planned in load.due(now):
                self._send(planned)
            if engine.busy:
                self._generating += self._clock() - self._began - now
                outputs = engine.step()
                now = self._clock() - self._began
                for output in outputs:
                    self._take(output, now)
                self._generating += self._clock() - self._began - now
                if engine.pause:
                    self._sleep(min(engine.pause, NAP))
            elif load.next_at == math.inf:
                return
            else:
                self._sleep(min(max(load.next_at - now, 0.0), NAP))

    def _send(self, planned: PlannedRequest) -> None:
        asked, now = planned.request, self._clock() - self._began
        said = self._said.pop(planned.before.id, []) if planned.before is not None else []
        tokens = self._prompts.of(planned, said)
        num = asked.sampling.max_tokens
        sample = Sample(asked.id, planned.at, now, len(tokens), num, asked.labels.get(LABEL, ""))
        self._samples[asked.id], self._said[asked.id] = sample, []
        sampling = Sampling(temperature=self._temperature, max_tokens=num)
        request = Request(self._name(asked.id), tokens, sampling, priority=asked.priority, labels=asked.labels)
        request.salt = f"{self._salt}{asked.salt or ''}" or None
        try:
            self._engine.add(request)
        except ValueError as error:
            self._end(sample, now, f"refused: {error}")

    def _name(self, request_id: str) -> str:
        return f"{self._salt}/{request_id}"

    def _take(self, output: Output, now: float) -> None:
        sample = self._samples[output.request_id.removeprefix(f"{self._salt}/")]
        if output.tokens:
            sample.deliveries.append((now, len(output.tokens)))
            self._said[sample.id] += output.tokens
        if output.finish is not None:
            sample.num_cached = output.num_cached
            self._end(sample, now, output.error or "failed" if output.finish is Finish.ERROR else None)

    def _end(self, sample: Sample, now: float, error: str | None) -> None:
        sample.ended, sample.error = now, error
        self._num_ended += 1
        if not self._load.answered(sample.id, now):
            self._prompts.forget(sample.id)
            self._said.pop(sample.id, None)
        self._on_progress(self._num_ended)


def warm(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> None:
    """Let the engine meet these lengths once: what is compiled or allocated at the first call is not measured."""
    sampling = Sampling(temperature=0.0, max_tokens=num_tokens)
    for _ in engine.generate([Request(f"warm-up {i}", p, sampling, salt="warm-up") for i, p in enumerate(prompts)]):
        pass
