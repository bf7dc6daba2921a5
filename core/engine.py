"""The engine: requests in, outputs out, one step at a time. Single-threaded by design; it knows no text.

    add ─▶ waiting ─▶ schedule ─▶ Draft ─▶ Step ─▶ runner ─▶ Result ─▶ account ─▶ Output
              ▲                                                          │
              └───────────── preempted, blocks given back ◀──────────────┘

A request's progress is one number: `num_computed` of `len(tokens)`. There is no prefill phase and no decode phase, only
chunks.

Where the runner computes while we schedule (`AsyncRunner`), a step is accounted for when the next one was scheduled, which
takes it that everybody goes on, with a token that is PENDING. What is computed for those who ended is thrown away. Steps
are computed in order, so a block may be given to another while the step before still writes to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from turnout.core.cost import StepCost
from turnout.core.draft import Draft
from turnout.core.grammars import Grammars
from turnout.core.hooks import Hooks
from turnout.core.interfaces import BlockManager, Preemption, Scheduler
from turnout.core.model import Runner
from turnout.core.optional import SharingBlocks
from turnout.core.structured import Structured
from turnout.core.swap import Swapper
from turnout.core.types import (
    PENDING,
    ContractError,
    EngineInfo,
    Finish,
    Limits,
    Logprobs,
    Output,
    Request,
    Result,
    Stats,
    Step,
    StepReport,
    Timing,
)

IDLE_STEPS = 1000  # so many empty steps may pass while requests wait; then the scheduler is broken
VAIN_STEPS = 10_000  # so many steps may pass without any request coming further than it ever was
FAILED_STEPS = 3  # so many failed forward passes in a row end the engine: the device is gone, not one request wrong

log = logging.getLogger("turnout.engine")
_new = tuple.__new__  # a named tuple in half the time


class Flight(NamedTuple):
    """A step and how it came about; `future` is its result if the runner computes it while we go on."""

    step: Step
    draft: Draft
    scheduled: float
    future: Future[Result] | None


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
        self._runner, self._scheduler, self._blocks, self._hooks, self._clock = runner, scheduler, blocks, hooks, clock
        blocks.start(info.num_blocks)
        self._sharing = blocks if isinstance(blocks, SharingBlocks) else None
        if self._sharing is not None:
            self.stats.blocks = self._sharing.stats
        self._swapper = Swapper(blocks, preemption, self.stats)
        self.cost = StepCost()
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._unborn: dict[str, Request] = {}  # wait for their parent's prompt; no scheduler sees them yet
        self._kept: dict[str, Request] = {}  # finished, with their blocks
        self._compiling: dict[str, Request] = {}  # wait for their form; no scheduler sees them yet
        self._grammars = Grammars(structured, limits or Limits(), info.vocab_size, self.stats.grammars, clock)
        self._ahead: Flight | None = None  # what is being computed
        self._ended = 0.0
        self._number = self._idle_steps = self._failed_steps = 0
        self._wants_added = bool(hooks.hook.request_added.get_hookimpls())
        self._wants_finished = bool(hooks.hook.request_finished.get_hookimpls())
        self._wants_steps = bool(hooks.hook.step_finished.get_hookimpls())

    @property
    def busy(self) -> bool:
        """Some request is not finished."""
        return bool(self._waiting or self._running or self._unborn or self._compiling)

    @property
    def waiting(self) -> tuple[Request, ...]:
        return (*self._waiting.values(), *self._unborn.values(), *self._compiling.values())

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
        room = max(asked - 1, len(request.tokens))  # the last token sampled is never fed back, so it needs no slot
        if room > info.capacity:
            raise ValueError(
                f"the request needs room for {room} tokens, but the whole key/value cache holds {info.capacity} "
                f"({info.num_blocks} blocks of {info.block_size})"
            )
        request.arrived = request.arrived or self._clock()
        if self._grammars.ask(request, self._kept.get(request.parent or "")):
            self._queue(request)
        else:
            self._compiling[request.id] = request
        if self._wants_added:
            self._hooks.hook.request_added(request=request)

    def _queue(self, request: Request) -> None:
        if request.parent is None:
            self._waiting[request.id] = request
        else:
            self._unborn[request.id] = request
            self._bear()

    def _queues(self, *others: dict[str, Request]) -> tuple[dict[str, Request], ...]:
        return (self._running, self._waiting, self._unborn, self._compiling, *others)

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
            self._finish(request, Finish.ABORT)
            self._bear()
            self._gauge()

    def drop(self, request_id: str) -> None:
        """Give back what a finished request with `keep` still holds. Harmless when that is gone."""
        request = self._kept.pop(request_id, None)
        if request is not None:
            self._blocks.release(request)
            self._grammars.drop(request_id)
            self._hooks.hook.request_dropped(request=request)
            self._gauge()

    def step(self) -> list[Output]:
        """Schedule, compute, account. Returns what each request got.

        Raises ContractError when the scheduler breaks a rule; every block is whole then, and no request is lost.
        """
        settled = self._settle_grammars()
        draft = self._draft(self._clock())
        step, scheduled = self._schedule(draft), self._clock()
        submit = getattr(self._runner, "submit", None)  # isinstance(…, AsyncRunner) takes microseconds
        future = None if submit is None else submit(step)
        if future is not None and self._sharing is not None:
            self._sharing.settle(True)  # there was nothing to move
        before, self._ahead, outputs, result = self._ahead, None, settled, None
        if before is not None:
            result = self._compute(before)
            outputs += self._land(before, result)
            ended = [chunk for chunk in step.chunks if chunk.request.finish is not None]
            if ended and future is None:
                chunks = tuple(chunk for chunk in step.chunks if chunk not in ended)
                step = replace(step, chunks=chunks, constraint=self._grammars.constrain(chunks))
        flight = Flight(step, draft, scheduled, future)
        if isinstance(result, Exception):
            outputs += self._land(flight, result)  # it was built on what failed
        elif future is None:
            outputs += self._land(flight, self._compute(flight))
        else:
            self._advance(flight)
        self._bear()
        self._gauge()
        return outputs

    def _advance(self, flight: Flight) -> None:
        """Take it that a step is computed, so that the next can be scheduled."""
        self._ahead = flight
        for request, start, count, samples in flight.step.chunks:
            if request.finish is None:
                if request.id in self._waiting:
                    self._admit(request, start, flight.draft.now)
                request.num_computed = start + count
                if samples and request.num_generated + 1 < request.sampling.max_tokens:
                    request.tokens.append(PENDING)

    def _land(self, flight: Flight, result: Result | Exception) -> list[Output]:
        """Account for a step that was computed, or failed."""
        step, draft, scheduled, future = flight
        began, ended = draft.now, self._clock()
        if self._sharing is not None and future is None:
            self._sharing.settle(isinstance(result, Result))
        if isinstance(result, Result):
            if step.chunks:
                moved = len(step.swap_out) + len(step.swap_in)  # the block manager's too
                self.cost.observe(draft.load._replace(moved_blocks=moved), ended - max(began, self._ended))
            outputs = self._account(flight, result, ended)
        else:
            outputs = self._fail(flight, result, ended)
        self._number += 1
        self._ended = ended
        self.stats.schedule_seconds, self.stats.step_seconds = scheduled - began, ended - began
        if self._wants_steps:
            self._gauge()
            self._tell(
                step, result, StepReport(self._number, began, scheduled, ended, (), draft.reasons, *self._counts())
            )
        return outputs

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
        finally:
            for request_id in ids:
                self.abort(request_id)

    def _draft(self, now: float) -> Draft:
        return Draft(
            self._blocks,
            self._swapper,
            self._waiting,
            self._running,
            self._kept,
            self.cost,
            max_tokens=self.info.max_num_batched_tokens,
            max_seqs=self.info.max_num_seqs,
            sharing=self._sharing,
            now=now,
        )

    def _schedule(self, draft: Draft) -> Step:
        if self._sharing is not None:
            self._sharing.begin(draft.now)
        try:
            running = tuple(self._running.values())
            if self._ahead is not None:
                running = tuple(r for r in running if r.num_pending)  # not those whose last token is being computed
            self._scheduler.schedule(tuple(self._waiting.values()), running, draft)
            step = draft.freeze()
            self._watch_progress(step)
        except Exception as error:
            self._back_to_waiting(draft.undo())
            self._gauge()
            name = type(self._scheduler).__qualname__
            raise ContractError(f"the scheduler {name} failed: {type(error).__name__}: {error}") from error
        self._back_to_waiting(step.preempted)
        constraint = self._grammars.constrain(step.chunks)
        return step if constraint is None else replace(step, constraint=constraint)

    def _watch_progress(self, step: Step) -> None:
        """Raise ContractError when for long nothing ran, or the same was computed and thrown away again."""
        if not (self._waiting or self._running or self._unborn) or any(c.end > c.request.furthest for c in step.chunks):
            self._idle_steps = 0
            return
        self._idle_steps += 1
        moved = bool(step.chunks or step.preempted)
        if self._idle_steps > (VAIN_STEPS if moved else IDLE_STEPS):
            what = "no request came further" if moved else "it ran nothing"
            counts = f"{len(self._waiting)} requests wait and {len(self._running)} run"
            raise ContractError(f"{what} for {self._idle_steps - 1} steps while {counts}")

    def _compute(self, flight: Flight) -> Result | Exception:
        step, future = flight.step, flight.future
        if not (step.chunks or step.swap_out):
            return Result([])  # copies and swap_in serve chunks
        try:
            result = self._runner.run(step) if future is None else future.result()
            self._failed_steps = 0
            return result
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= FAILED_STEPS:
                raise
            log.exception("a step of %d requests failed; they get an error, the others go on", len(step.chunks))
            return error

    def _account(self, flight: Flight, result: Result, now: float) -> list[Output]:
        ahead = flight.future is not None
        if not ahead:
            self._swapper.done()
        constraint = flight.step.constraint
        if constraint is not None:
            result = constraint.judged(result)
        index, lost, num_tokens, outputs, size = 0, 0, 0, [], self.info.block_size
        waiting, publish, tokens = self._waiting, self._blocks.publish, result.tokens
        plain = not (result.scores or result.logprobs or result.errors or constraint)
        complete = constraint.complete if constraint is not None else ()
        for request, start, count, samples in flight.step.chunks:
            num_tokens += count
            if ahead:
                if request.finish is not None:
                    lost += samples and index not in result.errors
                    index += samples
                    continue
                if request.tokens[-1] == PENDING:
                    request.tokens.pop()
                end = start + count
            else:
                if request.id in waiting:
                    self._admit(request, start, flight.draft.now)
                end = request.num_computed = start + count
            furthest = request.furthest
            if end > furthest:
                request.furthest = end
            if start < furthest:
                self.stats.recomputed_tokens += min(end, furthest) - start
            if end % size < count and request.blocks:  # a block became full, and was not taken away since
                publish(request)
            if not (samples and plain):
                outputs += self._result_of(request, end, index if samples else None, result, complete, now)
                index += samples
                continue
            token, history, sampling = tokens[index], request.tokens, request.sampling  # the common case, kept cheap
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
        marks = () if shown is None else (shown,)
        verdict = Finish.COMPLETE if index in complete else _verdict(request, token)
        return [self._output(request, (token,), verdict, marks, scored, None, now)]

    def _admit(self, request: Request, start: int, began: float) -> None:
        """A waiting request ran."""
        self._running[request.id] = self._waiting.pop(request.id)
        if request.scheduled_at is None:
            request.scheduled_at = began
            request.num_cached = start
            if request.parent is None or not start:  # else its prompt was its parent's, which counted
                self.stats.prompt_tokens += request.num_prompt
                self.stats.cached_tokens += start

    def _bear(self) -> None:
        """Let those wait in line whose parent has computed its prompt, or is gone. They go first: it has waited."""
        if not self._unborn:
            return
        born = {}
        for child in self._unborn.values():
            rid = child.parent or ""
            parent = next((queue[rid] for queue in self._queues() if rid in queue), None)
            if parent is None or parent.num_generated:
                born[child.id] = child
        for rid in born:
            del self._unborn[rid]
        self._waiting = born | self._waiting

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
            self._running.pop(request.id, None)
            self._waiting.pop(request.id, None)
            self._finish(request, finish)
        return Output(request.id, tokens, finish, logprobs, scored, error, request.num_cached, timing)

    def _fail(self, flight: Flight, error: Exception, now: float) -> list[Output]:
        """The forward pass failed: its requests end with an error, whose cause may be any of them."""
        if flight.future is None:
            self._swapper.undo()
        message = f"the step failed: {type(error).__name__}: {error}"
        lost = [chunk.request for chunk in flight.step.chunks if chunk.request.finish is None]
        return [self._output(request, (), Finish.ERROR, (), (), message, now) for request in lost]

    def _finish(self, request: Request, why: Finish) -> None:
        request.finish = why
        if request.tokens[-1] == PENDING:
            request.tokens.pop()
        if request.keep and why in (Finish.STOP, Finish.COMPLETE, Finish.LENGTH):
            self._kept[request.id] = request
        else:
            self._blocks.release(request)
            self._grammars.drop(request.id)
        self._swapper.drop(request)
        self.stats.finished[why.value] = self.stats.finished.get(why.value, 0) + 1
        if self._wants_finished:
            self._hooks.hook.request_finished(request=request)

    def _back_to_waiting(self, requests: Iterable[Request]) -> None:
        oldest_first = sorted(requests, key=lambda request: request.arrived)
        back = {request.id: self._running.pop(request.id) for request in oldest_first}
        if back:
            self._waiting = back | self._waiting

    def _tell(self, step: Step, result: Result | Exception, report: StepReport) -> None:
        if isinstance(result, Result):
            report = report._replace(tokens=result.tokens)
        else:
            report = report._replace(error=f"{type(result).__name__}: {result}")
        self._hooks.hook.step_finished(step=step, seconds=report.ended - report.began, report=report)

    def _counts(self) -> tuple[int, int, int]:
        """Waiting, running, free blocks."""
        return len(self._waiting) + len(self._unborn) + len(self._compiling), len(self._running), self._blocks.num_free

    def _gauge(self) -> None:
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
