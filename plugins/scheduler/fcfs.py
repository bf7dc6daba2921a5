"""First come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, Request


@dataclass
class FCFS:
    """Runs what runs, then admits what waits, each with all its pending tokens. Out of blocks, the newest gives way.

    Continuous batching as in Orca (OSDI 2022). A long prompt takes a whole step: use `chunked_prefill` where the gaps
    between the tokens of running streams matter. Nobody starves: the oldest request always runs.
    """

    def schedule(self, waiting: Sequence[Request], running: Sequence[Request], draft: Draft) -> None:
        queue = deque(running)
        while queue and not draft.full:
            request = queue.popleft()
            while not draft.take(request):  # out of blocks
                victim = queue.pop() if queue else request
                draft.preempt(victim)
                if victim is request:
                    return
        for request in waiting:
            if draft.preempted or draft.full or not draft.take(request):
                return
