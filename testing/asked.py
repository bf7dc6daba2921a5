"""What a request of the fake model should get, and what plugins hear of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from turnout.core.engine import Engine
from turnout.core.hooks import hookimpl
from turnout.core.types import Finish, Output, Request, StepReport
from turnout.testing.fake import continuation


@lru_cache(maxsize=4096)
def said_after(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The oracle, which need not work out the same twice."""
    return tuple(continuation(prompt, num_tokens))


@dataclass
class Asked:
    """Takes the request's outputs. Raises AssertionError at the first that is wrong."""

    request: Request
    wanted: tuple[int, ...]  # the oracle's tokens, to the end
    why: Finish  # that it should end with
    got: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, output: Output, may_fail: bool) -> None:
        """`may_fail`: it was made to fail."""
        rid, prompt = self.request.id, self.request.tokens[: self.request.num_prompt]
        assert self.finish is None, f"{rid} gets an output after its end"
        self.got += output.tokens
        assert tuple(self.got) == self.wanted[: len(self.got)], f"{rid} got {self.got}, the oracle says {self.wanted}"
        self.scored += [mark.token for mark in output.prompt_logprobs]
        assert self.scored == prompt[1 : 1 + len(self.scored)], f"{rid} has scores of {self.scored}, it is {prompt}"
        assert output.num_cached < len(prompt), f"{rid} has {output.num_cached} cached of {len(prompt)} prompt tokens"
        self.finish, timing = output.finish, output.timing
        assert (timing is None) is (output.finish is None), f"{rid} has its times {timing} before its end, or has none"
        if timing is not None:
            times = [time for time in timing if time is not None]
            assert times == sorted(times) and times[0] > 0, f"{rid} has times out of order: {timing}"
            assert (timing.first_token is not None) is bool(self.got), f"{rid} got {self.got}, the first at {timing}"
        if output.finish is Finish.ERROR:
            assert may_fail, f"{rid} failed, and nobody let it: {output.error}"
        elif output.finish is not None:
            assert tuple(self.got) == self.wanted, f"{rid} ended with {self.got}, the oracle says {self.wanted}"
            assert output.finish is self.why, f"{rid} ended with {output.finish}, not {self.why}"
            if self.request.sampling.prompt_logprobs is not None:
                assert len(self.scored) == len(prompt) - 1, f"{rid} has {len(self.scored)} scores of {len(prompt) - 1}"


class Listener:
    """What a plugin hears."""

    def __init__(self) -> None:
        self.added, self.finished, self.dropped = list[Request](), list[Request](), list[Request]()
        self.num_steps, self.reports = 0, list[StepReport]()

    @hookimpl
    def request_added(self, request: Request) -> None:
        self.added.append(request)

    @hookimpl
    def request_finished(self, request: Request) -> None:
        self.finished.append(request)

    @hookimpl
    def request_dropped(self, request: Request) -> None:
        self.dropped.append(request)

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self.reports.append(report)

    def check_step(self, engine: Engine, failed: bool) -> None:
        """A step was made."""
        self.num_steps += 1
        assert len(self.reports) == self.num_steps, (
            f"plugins were told of {len(self.reports)} of {self.num_steps} steps"
        )
        report, stats = self.reports[-1], engine.stats
        assert report.number == self.num_steps, f"step {self.num_steps} was told as the {report.number}th"
        assert (report.error is not None) is failed, f"step {report.number} was told to have failed: {report.error}"
        assert report.began <= report.scheduled <= report.ended, (
            f"step {report.number} has times out of order: {report}"
        )
        told = (report.num_waiting, report.num_running, report.num_blocks_free)
        gauges = (stats.num_waiting, stats.num_running, stats.num_blocks_free)
        assert told == gauges, f"waiting, running and free blocks are {gauges}, plugins were told {told}"
