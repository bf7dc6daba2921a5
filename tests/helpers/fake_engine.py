"""A scripted engine for tests of the processes around it. What a request does is told by its label "do"."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from turnout.core.types import ContractError, EngineInfo, Finish, Output, Request, Stats
from turnout.server.engine.messages import Ask, BeamSearch
from turnout.server.engine.worker import LoadingReporter

BUILDER = "fake_engine:build"
STEP = 0.005  # seconds

INFO = EngineInfo(
    model="fake",
    path="nowhere",
    architecture="Counter",
    dtype="float32",
    device="cpu",
    vocab_size=1000,
    max_model_len=1000,
    num_blocks=10,
    block_size=16,
    capacity=160,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    fingerprint="fp_fake",
    composition={},
    plugins={"scheduler": {"name": "fcfs", "package": "turnout", "version": "1"}},
    versions={},
    notes=("counts from zero",),
)


class FakeEngine:
    """Each step gives every request the next number, from 0 to max_tokens - 1. Answer k of a beam search is them plus k,
    told in its last step."""

    def __init__(self) -> None:
        self.info, self.stats = INFO, Stats()
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, tuple[str, ...]] = {}  # of beam searches, by their id
        self.closed = False

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @property
    def pause(self) -> float:
        return 0.0 if self.stats.step_tokens else 0.001

    def fail(self, reason: str) -> list[Output]:
        failed = [Output(rid, finish=Finish.ERROR, error=reason) for rid in self.requests]
        self.requests.clear()
        return failed

    def overdue(self, seconds: float) -> str | None:
        hangs = any(request.labels.get("do") == "hang" for request in self.requests.values())
        return f"a step takes {seconds:.1f} s" if hangs and seconds > 0.5 else None

    def add(self, asked: Ask) -> None:
        request = asked
        if isinstance(asked, BeamSearch):
            request, self.answers[asked.id] = asked.request, asked.answers
        assert isinstance(request, Request)
        if request.labels.get("do") == "refuse":
            raise ValueError("it can never fit: 2000 of 1000 tokens")
        self.requests[request.id] = request
        self.stats.num_running = len(self.requests)

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None):
            self._count(Finish.ABORT)

    def step(self) -> list[Output]:
        self.stats.num_steps += 1
        time.sleep(STEP)
        for request in self.requests.values():
            misbehave(request.labels.get("do"))
        active = [r for r in self.requests.values() if r.labels.get("do") != "wait"]
        self.stats.step_tokens = len(active)
        outputs = [self._next(request) for request in active]
        self.stats.generated_tokens += len(outputs)
        return [one for output in outputs for one in self._told(output)]

    def answer(self, topic: str, name: str) -> object:
        return {"topic": topic, "name": name, "open": list(self.requests)}

    def close(self) -> None:
        self.closed = True

    def _told(self, output: Output) -> list[Output]:
        if output.request_id not in self.answers:
            return [output]
        if output.finish is None:
            return []
        num = output.tokens[0] + 1
        return [
            output._replace(request_id=name, tokens=tuple(range(place, place + num)))
            for place, name in enumerate(self.answers.pop(output.request_id))
        ]

    def _next(self, request: Request) -> Output:
        token = request.num_generated
        request.tokens.append(token)
        finish = Finish.LENGTH if request.num_generated >= request.sampling.max_tokens else None
        if request.labels.get("do") == "error":
            finish = Finish.ERROR
        if finish:
            del self.requests[request.id]
            self._count(finish)
        return Output(
            request.id, (token,), finish, error="its logits are not finite" if finish is Finish.ERROR else None
        )

    def _count(self, finish: Finish) -> None:
        self.stats.num_running = len(self.requests)
        self.stats.finished[finish.value] = self.stats.finished.get(finish.value, 0) + 1


def misbehave(how: str | None) -> None:
    if how == "raise":
        raise RuntimeError("the scheduler lost its mind")
    if how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "long":
        time.sleep(1.2)
    if how == "hang":
        time.sleep(1000)
    if how == "break":
        raise ContractError("the scheduler Odd failed: KeyError: 7")
    if how == "slow":
        time.sleep(0.3)
    if how == "exit":
        os._exit(7)
    if how == "crash":
        os.abort()


def build(config: Mapping[str, Any], report: LoadingReporter) -> FakeEngine:
    report("reading", 0.5)
    match config.get("load"):
        case "value error":
            raise ValueError("attention=warp is not installed")
        case "bug":
            raise KeyError("lm_head")
        case "exit":
            os._exit(3)
        case "forever":
            time.sleep(1000)
        case "tidy":
            try:
                time.sleep(1000)
            finally:
                os.remove(config["file"])
    report.found("here")
    report("reading", 1.0)
    return FakeEngine()
