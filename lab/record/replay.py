"""Runs a recording again: the same scheduler, block manager and preemption, fed with what happened, must decide the same.

The engine, the draft and the plugins are the live ones. Only the model is missing: the recorded tokens come back instead
of computed ones, and the clock says the recorded times, so a policy that learns what steps cost learns the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from turnout.compose import plugins
from turnout.core import Request, Step, StepReport, hookimpl
from turnout.core.engine import Engine
from turnout.core.hooks import new_hooks
from turnout.core.model import Logprobs, Result
from turnout.core.types import ContractError, EngineInfo
from turnout.server.steplog.events import Aborted, Added, Dropped, Event, Finished, Header, Stepped, Stopped, read
from turnout.server.steplog.record import finished, stepped


class ReplayDifference(NamedTuple):
    """Where a replay went another way first."""

    step: int
    what: str  # "chunks", "preempted", ...
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return f"step {self.step}, {self.what}: recorded {self.recorded}, replayed {self.replayed}"


class ReplayResult(NamedTuple):
    """How it went."""

    num_steps: int  # that came out the same
    num_requests: int
    difference: ReplayDifference | None
    stopped: str | None  # why the recording ends before its engine did, if it does


COMPARED = (
    "chunks",
    "preempted",
    "swap_out",
    "copies",
    "swap_in",
    "reasons",
    "finished",
    "waiting",
    "running",
    "blocks_free",
)


def replay(path: str | Path) -> ReplayResult:
    """Replay a recording up to its end, or to the first difference. Raises ValueError for a file that is none,
    PluginError when a plugin it was made with is not installed."""
    return replay_events(read(path))


def replay_events(events: Iterable[Event], observe: Callable[[Stepped], None] = lambda step: None) -> ReplayResult:
    """As `replay`. `observe` hears of every step as it was replayed."""
    stream = iter(events)
    header = next(stream)
    assert isinstance(header, Header)
    engine, reel = rebuilt(header.info)
    num_steps = num_requests = 0
    stopped = None
    with _quiet():
        for event in stream:
            match event:
                case Added(request):
                    num_requests += 1
                    reel.times = [request.arrived]
                    engine.add(request)
                case Aborted(request_id):
                    engine.abort(request_id)
                case Dropped(request_id):
                    engine.drop(request_id)
                case Stopped(why):
                    stopped = why
                case Stepped():
                    difference = _again(engine, reel, event)
                    if difference is not None:
                        return ReplayResult(num_steps, num_requests, difference, None)
                    assert reel.seen is not None
                    observe(reel.seen)
                    num_steps += 1
    return ReplayResult(num_steps, num_requests, None, stopped)


def rebuilt(info: EngineInfo) -> tuple[Engine, Reel]:
    """An engine of the recorded policies and limits, and the reel that stands for its model, its clock and its hooks."""
    parts = {slot: component(info.composition, slot) for slot in ("scheduler", "blocks", "preemption")}
    reel, hooks = Reel(), new_hooks()
    hooks.register(reel)
    engine = Engine(reel, parts["scheduler"], parts["blocks"], parts["preemption"], info, hooks=hooks, clock=reel.clock)
    return engine, reel


def component(composition: Any, slot: str) -> Any:
    """A new object of the plugin that a composition names for a slot, with its options."""
    if slot not in composition:
        raise ValueError(f"the recording does not say which {slot} its engine had, so it can't be replayed")
    named = composition[slot]
    node = OmegaConf.structured(plugins.load().get(slot, named["name"]).component)
    return OmegaConf.to_object(OmegaConf.merge(node, named["options"]))


def _again(engine: Engine, reel: Reel, recorded: Stepped) -> ReplayDifference | None:
    """Make the step again; what is not the same."""
    reel.wind(recorded)
    try:
        engine.step()
    except (ContractError, RecordedFailure) as error:
        return ReplayDifference(recorded.number, "the engine", "went on", f"{type(error).__name__}: {error}")
    seen = reel.seen
    assert seen is not None
    for name in COMPARED:
        before, now = getattr(recorded, name), getattr(seen, name)
        if before != now:
            return ReplayDifference(recorded.number, name, before, now)
    return None


class RecordedFailure(Exception):
    """The recorded step failed, so the replayed one does."""


class Reel:
    """What a replayed engine has instead of a model and a clock."""

    def __init__(self) -> None:
        self.times: list[float] = []  # the clock says these, the last one first
        self.seen: Stepped | None = None  # the step as it was replayed
        self._recorded: Stepped | None = None
        self._finished: list[Finished] = []

    def clock(self) -> float:
        return self.times.pop()

    def wind(self, step: Stepped) -> None:
        """The next step is this one."""
        self._recorded, self.seen, self._finished = step, None, []
        self.times = [step.ended, step.scheduled, step.began]

    def run(self, step: Step) -> Result:
        """See Runner."""
        recorded = self._recorded
        assert recorded is not None
        if recorded.error is not None:
            raise RecordedFailure(recorded.error)
        failed = {end.request_id for end in recorded.finished if end.why == "error"}
        sampled = [chunk.request.id for chunk in step.chunks if chunk.samples]
        tokens = (list(recorded.tokens) + [0] * len(sampled))[: len(sampled)]  # too few: it differs, as will be seen
        errors = {index: "as recorded" for index, request_id in enumerate(sampled) if request_id in failed}
        return Result(tokens, errors=errors, scores=dict(_scores(step)))

    @hookimpl
    def request_finished(self, request: Request) -> None:
        self._finished.append(finished(request))

    @hookimpl
    def step_finished(self, step: Step, report: StepReport) -> None:
        self.seen = stepped(step, report, self._finished)


def _scores(step: Step) -> Iterator[tuple[str, list[Logprobs]]]:
    """As many scores as a runner gives; their values decide nothing."""
    for request, start, count, _ in step.chunks:
        first, end = max(start, request.num_scored), min(start + count, request.num_prompt - 1)
        if request.sampling.prompt_logprobs is not None and first < end:
            yield request.id, [Logprobs(request.tokens[place + 1], 0.0, 1) for place in range(first, end)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Failures that were recorded are no news."""

    def news(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], RecordedFailure)

    engine_log = logging.getLogger("turnout.engine")
    engine_log.addFilter(news)
    try:
        yield
    finally:
        engine_log.removeFilter(news)
