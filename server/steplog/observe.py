"""What observes a live engine: the step log and the recording, and what they answer to questions from outside."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any

from turnout.core.hooks import Hooks
from turnout.core.types import EngineInfo, Stats
from turnout.server.steplog.log import StepLog
from turnout.server.steplog.record import Recorder

NUM_LAST = 5  # steps told of when the engine fails
NUM_STEPS = 100  # steps shown to who asks

log = logging.getLogger("turnout.engine")


class Observers:
    """What listens to the hooks: make it before the engine is built. Raises ValueError as Recorder does."""

    def __init__(self, hooks: Hooks, record: str | None = None, record_limit: int = 0) -> None:
        self.log, self.recorder = StepLog(), None if record is None else Recorder(record, record_limit)
        hooks.register(self.log)
        if self.recorder is not None:
            hooks.register(self.recorder)

    def begin(self, info: EngineInfo) -> None:
        """The engine is built."""
        if self.recorder is not None:
            self.recorder.begin(info)

    def answer(self, topic: str, name: str, stats: Stats) -> object:
        """Plain values: of topic "request", the accounts of the request of that name; "requests", all in short;
        "engine", its counters and last steps."""
        if topic == "request":
            return self.log.why(name)
        if topic == "requests":
            return self.log.requests()
        assert topic == "engine", topic
        last = islice(reversed(self.log.steps), NUM_STEPS)
        steps: list[dict[str, Any]] = [entry._asdict() for entry in last]
        return {"stats": asdict(stats), "steps": steps[::-1]}

    def failed(self) -> None:
        """The engine has: log what it did last."""
        log.error("the engine's last steps:\n%s", self.log.tail(NUM_LAST))

    def close(self) -> None:
        """Write what is left of the recording."""
        if self.recorder is not None:
            self.recorder.close()


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
