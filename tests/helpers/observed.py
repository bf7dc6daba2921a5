"""An engine in this process that says what it does."""

from __future__ import annotations

from typing import Any

from engines import LocalEngine

from turnout.core.hooks import new_hooks
from turnout.plugins.scheduler import FCFS
from turnout.server.steplog.observe import Observers
from turnout.testing import make_engine


class Observed(LocalEngine):
    """An engine on the fake model in this process, with a step log."""

    def __init__(self) -> None:
        hooks = new_hooks()
        self._observers = Observers(hooks)
        super().__init__(make_engine(FCFS(), hooks=hooks, max_num_seqs=1))

    async def ask(self, topic: str, name: str = "") -> Any:
        return self._observers.answer(topic, name, self.stats)
