"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, RequestView


@dataclass
class FCFS:
    """Runs what runs, then admits what waits, each with all its pending tokens (continuous batching: Orca, OSDI 2022).

    Use it for throughput, or where prompts are short: a long one takes a whole step, and every stream waits for it.
    Bound: nobody is admitted before a request that arrived earlier, and the one admitted first always comes further.
    """

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        draft.run(running)
        for request in waiting:
            if not draft.admit(request):
                return
