"""The engine: requests in, outputs out, one step at a time. Single-threaded by design; it knows no text.

    add ─▶ waiting ─▶ schedule ─▶ Step ─▶ runner ─▶ Result ─▶ account ─▶ Output
              ▲                                                 │
              └──────── preempted, blocks given back ◀──────────┘

A request's progress is one number: `num_computed` of `len(tokens)`. There is no prefill phase and no decode phase, only
chunks. `pipelined.py` has the loop for a runner that computes while we schedule.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from turnout.core.builder import StepBuilder
from turnout.core.cost import CostModel, Load
from turnout.core.draft import Draft
from turnout.core.grammars import Grammars
from turnout.core.hooks import Hooks, Notifier
from turnout.core.interfaces import BlockManager, Preemption, Scheduler
from turnout.core.model import Runner
from turnout.core.optional import SharingBlocks
from turnout.core.structured import Structured
from turnout.core.swap import Swapper
from turnout.core.timelimit import Overdue, TimeLimit
from turnout.core.types import (
    PENDING,
    ContractError,
    EngineInfo,
    Finish,
    Limits,
    Logprobs,
    Output,
    Request,
    RequestView,
    Result,
    Stats,
    Step,
    StepReport,
    Timing,
)

SCHEDULE_SECONDS = 10.0  # that a call of the scheduler may take
IDLE_SECONDS, IDLE_STEPS = 10.0, 100  # a scheduler that runs nothing for both, and never calls `draft.wait`, is broken
FRUITLESS_STEPS = 10_000  # so many steps may pass without any request computed further than it ever was
EMPTY_STEP_PAUSE = 0.001  # seconds from a step that ran nothing to the next
STEP_SECONDS = 600.0  # that any step may take; longer, where more is expected of it
FAILED_STEPS = 3  # so many failed forward passes in a row end the engine: the device is gone, not one request wrong

log = logging.getLogger("turnout.engine")
_new = tuple.__new__  # a named tuple in half the time


class PlannedStep(NamedTuple):
    """A step, and how it came about."""

    step: Step
    load: Load
    fitted: bool  # to a time, by what steps are expected to take
    reasons: Mapping[str, str]
    began: float
    scheduled: float


class Engine:
    """Owns the requests and the order of things; policies decide, the runner computes."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        blocks: BlockManager,
        preemption: Preemption,
        info: EngineInfo,
        *,
        hooks: Hooks,
        structured: Structured | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info, self.stats = info, Stats(num_blocks=info.num_blocks, num_blocks_free=info.num_blocks)
        self._runner, self._scheduler, self._blocks, self._clock = runner, scheduler, blocks, clock
        blocks.start(info.num_blocks)
        self._sharing = blocks if isinstance(blocks, SharingBlocks) else None
        if self._sharing is not None:
            self.stats.blocks = self._sharing.stats
        self._swapper = Swapper(blocks, preemption, self.stats)
        self.cost = CostModel()
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._blocked_on_parent: dict[str, Request] = {}  # until its prompt is computed; no scheduler sees them yet
        self._compiling: dict[str, Request] = {}  # until their form is compiled; no scheduler sees them yet
        self._kept: dict[str, Request] = {}  # finished, with their blocks
        self._grammars = Grammars(structured, limits or Limits(), info.vocab_size, self.stats.grammars, clock)
        self._notifier = Notifier(hooks, self.stats)
        self._schedule_limit = TimeLimit(SCHEDULE_SECONDS)
        self._computing: Load | None = None  # what the runner is asked to compute now
        self._num_steps = self._fruitless_steps = self._failed_steps = 0
        self._fruitless_since = self._finished_at = self._resume_at = -math.inf

    @property
    def busy(self) -> bool:
        """Some request is not finished."""
        return bool(self._waiting or self._running or self._blocked_on_parent or self._compiling)

    @property
    def pause(self) -> float:
        """Seconds in which another step would find nothing to do, unless something is asked of the engine."""
        return 0.0 if self._resume_at == -math.inf else max(self._resume_at - self._clock(), 0.0)

    @property
    def waiting(self) -> tuple[Request, ...]:
        return (*self._waiting.values(), *self._blocked_on_parent.values(), *self._compiling.values())

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running.values())

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that could never run, naming the limit and the number."""
        info, asked = self.info, len(request.tokens) + request.sampling.max_tokens
        if any(request.id in those for those in self._queues(self._kept)):
            raise ValueError(f"request id {request.id!r} is already in use")
        if request.parent == request.id:
            raise ValueError(f"request {request.id!r} names itself as its parent, and would wait for itself")
        _check_ids(request, info.vocab_size)
        if asked > info.max_model_len:
            raise ValueError(
                f"the prompt has {len(request.tokens)} tokens and max_tokens is {request.sampling.max_tokens}: together "
                f"{asked}, but the context length is {info.max_model_len} tokens"
            )
        slots = max(asked - 1, len(request.tokens))  # the last token sampled is never fed back, so it needs no slot
        if slots > info.capacity:
            raise ValueError(
                f"the request needs room for {slots} tokens, but the whole key/value cache holds {info.capacity} "
                f"({info.num_blocks} blocks of {info.block_size})"
            )
        request.arrived = request.arrived or self._clock()
        request.view = RequestView(request)
        if self._grammars.ask(request, self._kept.get(request.parent or "")):
            self._queue(request)
        else:
            self._compiling[request.id] = request
        self._notifier.tell("request_added", request=request)

    def _queue(self, request: Request) -> None:
        if request.parent is None:
            self._waiting[request.id] = request
        else:
            self._blocked_on_parent[request.id] = request
            self._release_children()

    def _queues(self, *others: dict[str, Request]) -> tuple[dict[str, Request], ...]:
        return (self._running, self._waiting, self._blocked_on_parent, self._compiling, *others)

    def _settle_grammars(self) -> list[Output]:
        """Let those wait in line whose form is compiled, and end those whose form is refused."""
        outputs: list[Output] = []
        for rid, refusal in self._grammars.settled() if self._compiling else ():
            request = self._compiling.pop(rid)
            if refusal is None:
                self._queue(request)
            else:
                outputs.append(self._output(request, (), Finish.REFUSED, (), (), refusal, self._clock()))
        if self._compiling and not (self._waiting or self._running):
            self._grammars.wait()
        return outputs

    def abort(self, request_id: str) -> None:
        """End a request wherever it is. Unknown ids are ignored: it may just have finished."""
        request = next((queue.pop(request_id) for queue in self._queues() if request_id in queue), None)
        if request is not None:
            self._end(request, Finish.ABORT)
            self._release_children()
            self._update_gauges()

    def drop(self, request_id: str) -> None:
        """Give back what a finished request with `keep` still holds. Harmless when that is gone."""
        request = self._kept.pop(request_id, None)
        if request is not None:
            self._blocks.release(request)
            self._grammars.drop(request_id)
            self._notifier.tell("request_dropped", request=request)
            self._update_gauges()

    def step(self) -> list[Output]:
        """Schedule, compute, account. Returns what each request got.

        Raises ContractError when the scheduler breaks a rule: every block is whole then, no request is lost, and another
        step may be made, or what is open ended by `fail`.
        """
        outputs = self._settle_grammars()
        planned = self._plan()
        outputs += self._finish(planned, self._compute(planned))
        self._release_children()
        self._update_gauges()
        return outputs

    def fail(self, reason: str) -> list[Output]:
        """End every request with this error: nothing can be done for them."""
        outputs = self._fail_all((*self.waiting, *self.running), reason, self._clock())
        self._fruitless_steps = 0
        self._update_gauges()
        return outputs

    def overdue(self, seconds: float) -> str | None:
        """Why a step that has been under way for so long must be taken to hang. From any thread."""
        load = self._computing
        bound = STEP_SECONDS if load is None else max(STEP_SECONDS, self.cost.estimate.bound(load))
        if seconds <= bound:
            return None
        name = type(self._scheduler).__qualname__
        what = f"the scheduler {name} or the core" if load is None else f"the computation of a step ({load})"
        return f"{what} has not returned for {seconds:.0f} s, and {bound:.0f} s are the most that is to be expected"

    def generate(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Add the requests and step until they are done. Leaving early aborts those still open."""
        ids = set()
        try:
            for request in requests:
                self.add(request)
                ids.add(request.id)
            while ids:
                for output in self.step():
                    if output.finish:
                        ids.discard(output.request_id)
                    yield output
                if self.pause:
                    time.sleep(EMPTY_STEP_PAUSE)
        finally:
            for request_id in ids:
                self.abort(request_id)

    def _plan(self) -> PlannedStep:
        """Let the scheduler write a step. Raises ContractError naming it; what it took is given back then."""
        now = self._clock()
        builder = self._builder(now)
        waiting = tuple([r.view for r in self._waiting.values()])
        running = tuple([r.view for r in self._schedulable()])
        try:
            self._schedule_limit.call(self._scheduler.schedule, waiting, running, Draft(builder))
            step = builder.close()
            self._watch_progress(step, builder.wait_until, now)
        except BaseException as error:
            self._back_to_waiting(builder.undo())
            self._update_gauges()
            if isinstance(error, KeyboardInterrupt):
                raise
            self.stats.scheduler_failures += 1
            what = f"{type(error).__name__}: {error}"
            if isinstance(error, Overdue):
                what = f"it did not return within {self._schedule_limit.seconds:g} s"
            name = type(self._scheduler).__qualname__
            raise ContractError(f"the scheduler {name} failed: {what}") from error
        self._back_to_waiting(step.preempted)
        constraint = self._grammars.constrain(step.chunks)
        step = step if constraint is None else replace(step, constraint=constraint)
        load = builder.load._replace(moved_blocks=len(step.swap_out) + len(step.swap_in))  # the block manager's too
        return PlannedStep(step, load, builder.fitted, builder.reasons, now, self._clock())

    def _builder(self, now: float) -> StepBuilder:
        if self._sharing is not None:
            self._sharing.begin(now)
        requests = (self._waiting, self._running, self._kept)
        return StepBuilder(self._blocks, self._sharing, self._swapper, *requests, self.cost, self.info, now)

    def _schedulable(self) -> Iterable[Request]:
        """The running requests that a step may take."""
        return self._running.values()

    def _watch_progress(self, step: Step, wait_until: float, now: float) -> None:
        """Raise ContractError when for long nothing ran, or the same was computed and thrown away again."""
        moved = bool(step.chunks or step.preempted)
        self._resume_at = -math.inf if moved else max(wait_until, now + EMPTY_STEP_PAUSE)
        schedulable = self._waiting or self._running or self._blocked_on_parent
        if not schedulable or wait_until > now or any(c.end > c.request.peak_computed for c in step.chunks):
            self._fruitless_steps = 0
            return
        if not self._fruitless_steps:
            self._fruitless_since = now
        self._fruitless_steps += 1
        seconds = now - self._fruitless_since
        lasted = f"for {seconds:.1f} s and {self._fruitless_steps} steps"
        lasted += f" while {len(self._waiting)} requests wait and {len(self._running)} run"
        if moved and self._fruitless_steps > FRUITLESS_STEPS:
            raise ContractError(f"no request came further {lasted}")
        if not moved and seconds > IDLE_SECONDS and self._fruitless_steps > IDLE_STEPS:
            raise ContractError(f"it ran nothing {lasted}, and never said that they wait (draft.wait)")

    def _compute(self, planned: PlannedStep) -> Result | Exception:
        """Run a step; its requests are as far as it computes them then, unless it failed."""
        step = planned.step
        result: Result | Exception = Result([])
        if step.chunks or step.swap_out:  # copies and swap_in serve chunks
            result = self._guarded(lambda: self._runner.run(step), planned)
        self._settle(happened=isinstance(result, Result))
        if isinstance(result, Result):
            self._mark_computed(step, planned.began)
        return result

    def _settle(self, *, happened: bool) -> None:
        """The planned step's moves have happened, or never will."""
        self._swapper.done() if happened else self._swapper.undo()
        if self._sharing is not None:
            self._sharing.settle(happened)

    def _guarded(self, result: Callable[[], Result], planned: PlannedStep) -> Result | Exception:
        """A result, or why there is none. Raises what one step after another fails with."""
        self._computing = planned.load
        try:
            found = result()
            self._failed_steps = 0
            return found
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= FAILED_STEPS:
                raise
            num = len(planned.step.chunks)
            log.exception("a step of %d requests failed; they get an error, the others go on", num)
            return error
        finally:
            self._computing = None

    def _mark_computed(self, step: Step, began: float) -> None:
        """Let the requests of a step be as far as it computes them."""
        waiting = self._waiting
        for request, start, count, _ in step.chunks:
            if request.id in waiting:
                self._enter(request, start, began)
            request.num_computed = start + count

    def _finish(self, planned: PlannedStep, result: Result | Exception) -> list[Output]:
        """Account for a step that was computed, or failed."""
        ended, stats = self._clock(), self.stats
        if isinstance(result, Result):
            if planned.step.chunks:
                self.cost.observe(planned.load, ended - max(planned.began, self._finished_at), planned.fitted)
            outputs = self._account(planned.step, result, ended)
        else:
            message = f"the step failed: {type(result).__name__}: {result}"  # the cause may be any of its requests
            lost = [chunk.request for chunk in planned.step.chunks if chunk.request.finish is None]
            outputs = self._fail_all(lost, message, ended)
        self._num_steps, self._finished_at = self._num_steps + 1, ended
        stats.schedule_seconds, stats.step_seconds = planned.scheduled - planned.began, ended - planned.began
        if self._notifier.of_steps:
            self._report(planned, result, ended)
        return outputs

    def _account(self, step: Step, result: Result, now: float) -> list[Output]:
        constraint = step.constraint
        if constraint is not None:
            result = constraint.judged(result)
        complete = constraint.complete if constraint is not None else ()
        index, lost, num_tokens, outputs, size = 0, 0, 0, [], self.info.block_size
        publish, tokens = self._blocks.publish, result.tokens
        plain = not (result.scores or result.logprobs or result.errors or constraint)
        for request, start, count, samples in step.chunks:
            num_tokens += count
            if request.finish is not None:  # it ended while this was computed
                lost += samples and index not in result.errors
                index += samples
                continue
            history, end, peak = request.tokens, start + count, request.peak_computed
            if history[-1] == PENDING:
                history.pop()
            if end > peak:
                request.peak_computed = end
            if start < peak:
                self.stats.recomputed_tokens += min(end, peak) - start
            if end % size < count and request.blocks:  # a block became full, and was not taken away since
                publish(request)
            if not (samples and plain):
                outputs += self._result_of(request, end, index if samples else None, result, complete, now)
                index += samples
                continue
            token, sampling = tokens[index], request.sampling  # the common case, kept cheap
            index += 1
            history.append(token)
            if request.first_token_at is None:
                request.first_token_at = now
            if token not in sampling.stop_ids and len(history) - request.num_prompt < sampling.max_tokens:
                outputs.append(_new(Output, (request.id, (token,), None, (), (), None, request.num_cached, None)))
            else:
                outputs.append(self._output(request, (token,), _verdict(request, token), (), (), None, now))
        self.stats.generated_tokens += index - lost - len(result.errors)
        self.stats.num_steps += 1
        self.stats.step_tokens = num_tokens
        return outputs

    def _result_of(
        self, request: Request, end: int, index: int | None, result: Result, complete: Collection[int], now: float
    ) -> list[Output]:
        """One chunk's share of a result: a token, scores, an error; perhaps nothing. `complete`: answers that may not go
        on, by their form."""
        scored = tuple(result.scores.get(request.id, ()))
        request.num_scored += len(scored)
        if index is None:
            done = request.sampling.max_tokens == 0 and end == len(request.tokens)
            if not (done or scored):
                return []
            return [self._output(request, (), Finish.LENGTH if done else None, (), scored, None, now)]
        if index in result.errors:
            return [self._output(request, (), Finish.ERROR, (), scored, result.errors[index], now)]
        token, shown = result.tokens[index], result.logprobs.get(index)
        request.tokens.append(token)
        if request.first_token_at is None:
            request.first_token_at = now
        logprobs = () if shown is None else (shown,)
        verdict = Finish.COMPLETE if index in complete else _verdict(request, token)
        return [self._output(request, (token,), verdict, logprobs, scored, None, now)]

    def _enter(self, request: Request, start: int, began: float) -> None:
        """A waiting request runs."""
        self._running[request.id] = self._waiting.pop(request.id)
        if request.scheduled_at is None:
            request.scheduled_at = began
            request.num_cached = start
            if request.parent is None or not start:  # else its prompt was its parent's, which counted
                self.stats.prompt_tokens += request.num_prompt
                self.stats.cached_tokens += start

    def _release_children(self) -> None:
        """Let those wait in line whose parent has computed its prompt, or is gone. They go first: it has waited."""
        blocked = self._blocked_on_parent
        if not blocked:
            return
        released = {}
        for child in blocked.values():
            rid = child.parent or ""
            parent = next((queue[rid] for queue in self._queues() if rid in queue), None)
            if parent is None or parent.num_generated:
                released[child.id] = child
        for rid in released:
            del blocked[rid]
        self._waiting = released | self._waiting

    def _output(
        self,
        request: Request,
        tokens: tuple[int, ...],
        finish: Finish | None,
        logprobs: tuple[Logprobs, ...],
        scored: tuple[Logprobs, ...],
        error: str | None,
        now: float,
    ) -> Output:
        timing = Timing(request.arrived, request.scheduled_at, request.first_token_at, now) if finish else None
        if finish:
            for queue in self._queues():
                queue.pop(request.id, None)
            self._end(request, finish)
        return Output(request.id, tokens, finish, logprobs, scored, error, request.num_cached, timing)

    def _fail_all(self, requests: Iterable[Request], reason: str, now: float) -> list[Output]:
        return [self._output(request, (), Finish.ERROR, (), (), reason, now) for request in requests]

    def _end(self, request: Request, why: Finish) -> None:
        request.finish = why
        del request.view  # they hold each other, and a served engine's collector seldom runs
        if request.tokens[-1] == PENDING:
            request.tokens.pop()
        if request.keep and why in (Finish.STOP, Finish.COMPLETE, Finish.LENGTH):
            self._kept[request.id] = request
        else:
            self._blocks.release(request)
            self._grammars.drop(request.id)
        self._swapper.drop(request)
        self.stats.finished[why.value] = self.stats.finished.get(why.value, 0) + 1
        self._notifier.tell("request_finished", request=request)

    def _back_to_waiting(self, requests: Iterable[Request]) -> None:
        oldest_first = sorted(requests, key=lambda request: request.arrived)
        back = {request.id: self._running.pop(request.id) for request in oldest_first}
        if back:
            self._waiting = back | self._waiting

    def _report(self, planned: PlannedStep, result: Result | Exception, ended: float) -> None:
        self._update_gauges()
        tokens = result.tokens if isinstance(result, Result) else ()
        error = f"{type(result).__name__}: {result}" if isinstance(result, Exception) else None
        times, counts = (planned.began, planned.scheduled, ended), self._counts()
        report = StepReport(self._num_steps, *times, tokens, planned.reasons, *counts, error)
        self._notifier.tell("step_finished", step=planned.step, seconds=ended - planned.began, report=report)

    def _counts(self) -> tuple[int, int, int]:
        """Waiting, running, free blocks."""
        return len(self.waiting), len(self._running), self._blocks.num_free

    def _update_gauges(self) -> None:
        stats = self.stats
        stats.num_waiting, stats.num_running, stats.num_blocks_free = self._counts()
        stats.num_compiling = len(self._compiling)
        stats.num_swapped = sum(1 for r in self._waiting.values() if r.host_blocks) if stats.host_blocks else 0


def _check_ids(request: Request, vocab_size: int) -> None:
    """Raise ValueError naming the field that holds a token id, or a count, beyond the vocabulary."""
    sampling = request.sampling
    ids: tuple[tuple[str, Iterable[int]], ...] = (
        ("prompt", request.tokens),
        ("logit_bias", sampling.logit_bias),
        ("stop_ids", sampling.stop_ids),
        ("forced", sampling.forced),
    )
    for name, tokens in ids:
        if tokens and not (0 <= min(tokens) and max(tokens) < vocab_size):
            bad = next(token for token in tokens if not 0 <= token < vocab_size)
            raise ValueError(f"{name} has token id {bad}, the model's ids are 0 to {vocab_size - 1}")
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise ValueError(f"{name} must be at most the vocabulary's size, {vocab_size}, got {count}")


def _verdict(request: Request, token: int) -> Finish | None:
    if token in request.sampling.stop_ids:
        return Finish.STOP
    return Finish.LENGTH if request.num_generated >= request.sampling.max_tokens else None
