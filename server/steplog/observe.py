"""Eyes for a live engine: the step log and the recording beside it, and answers to questions from outside."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from turnout.core.hooks import Hooks
from turnout.core.types import EngineInfo, Output, Stats
from turnout.server.engine.messages import Ask
from turnout.server.steplog.log import StepLog
from turnout.server.steplog.record import Recorder

if TYPE_CHECKING:
    from turnout.server.engine.worker import Stepped

NUM_LAST = 5  # steps told of when the engine fails
NUM_STEPS = 100  # steps shown to who asks

log = logging.getLogger("turnout.engine")


class Eyes:
    """What listens to the hooks: make it before the engine is built. Raises ValueError as Recorder does."""

    def __init__(self, hooks: Hooks, record: str | None, record_limit: int) -> None:
        self.log, self.recorder = StepLog(), None if record is None else Recorder(record, record_limit)
        hooks.register(self.log)
        if self.recorder is not None:
            hooks.register(self.recorder)


class ObservedEngine:
    """The engine as it is, and what is known of it."""

    def __init__(self, engine: Stepped, eyes: Eyes) -> None:
        self._engine, self._log, self._recorder = engine, eyes.log, eyes.recorder
        if self._recorder is not None:
            self._recorder.begin(engine.info)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def stats(self) -> Stats:
        return self._engine.stats

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def add(self, asked: Ask) -> None:
        self._engine.add(asked)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def step(self) -> list[Output]:
        try:
            return self._engine.step()
        except Exception:
            log.error("the engine's last steps:\n%s", self._log.tail(NUM_LAST))
            raise

    def answer(self, topic: str, name: str) -> object:
        """Plain values: of topic "request", the accounts of the request of that name; "requests", all in short;
        "engine", its counters and last steps."""
        if topic == "request":
            return self._log.why(name)
        if topic == "requests":
            return self._log.requests()
        assert topic == "engine", topic
        last = islice(reversed(self._log.steps), NUM_STEPS)
        steps: list[dict[str, Any]] = [entry._asdict() for entry in last]
        return {"stats": asdict(self.stats), "steps": steps[::-1]}

    def close(self) -> None:
        """Write what is left of the recording."""
        if self._recorder is not None:
            self._recorder.close()


@contextmanager
def recording(hooks: Hooks, record: str | None, record_limit: int) -> Iterator[Recorder | None]:
    """Record the engine that is built inside, if there is a file to record to; `begin` the recorder once it is built.

    Raises ValueError as Recorder does.
    """
    if record is None:
        yield None
        return
    recorder = Recorder(record, record_limit)
    hooks.register(recorder)
    try:
        yield recorder
    finally:
        hooks.unregister(recorder)
        recorder.close()
