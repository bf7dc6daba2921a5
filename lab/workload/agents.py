"""Agents: sessions that grow turn by turn, each turn asked for when the one before was answered."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from turnout.core.types import Request
from turnout.lab.workload.arrivals import FILLER, Arrival, prompt, sampling
from turnout.lab.workload.synthetic import Synthetic, geometric, lognormal, needs_rate


@dataclass
class Agents(Synthetic):
    """Agents that call tools: each turn's prompt is all that was said before, its answer and a tool's result.

    Every session begins with the same instructions. The next turn comes when the last one has finished and its tool
    has run, so a slow engine is asked less: arrivals beyond the first turn depend on what is simulated. `rate` counts
    requests; sessions begin at `rate / turns`.
    """

    rate: float | None = 5.0
    prompt: int = 300  # the first question, after the instructions
    output: int = 80
    prefix: int = 2000  # instructions and tools
    turns: int = 10  # of a session, mean
    tool: int = 600  # tokens of a tool's result, mean
    pause: float = 2.0  # seconds a tool runs, mean

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_rate(self)

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        assert self.rate is not None
        dice, gaps = random.Random(self.seed), random.Random(f"gaps of {self.seed}")
        now, begun, session = 0.0, 0, 0
        while begun < self.num_requests:
            now += gaps.expovariate(self.rate / self.turns * factor)
            turns = min(geometric(dice, self.turns), self.num_requests - begun)
            begun += turns
            yield _Session(self, session, turns, self.label(dice)).first(now)
            session += 1


class _Session:
    """One agent's conversation. Its dice are its own: what other sessions do changes nothing in it."""

    def __init__(self, kind: Agents, number: int, turns: int, labels: Mapping[str, str]) -> None:
        self._kind, self._number, self._left, self._labels = kind, number, turns, labels
        self._dice = random.Random(f"{kind.seed}/{number}")
        self._tokens: list[int] = []
        self._turn = 0

    def first(self, now: float) -> Arrival:
        instructions = prompt(self._kind.num_requests, self._kind.prefix)
        return self._say(now, instructions + prompt(self._number, lognormal(self._dice, self._kind.prompt)))

    def _say(self, now: float, more: list[int]) -> Arrival:
        self._tokens += more
        num_output = geometric(self._dice, self._kind.output)
        name = f"s{self._number}-{self._turn}"
        request = Request(name, self._tokens.copy(), sampling(num_output), now, labels=self._labels)
        self._tokens += [FILLER] * num_output
        self._turn, self._left = self._turn + 1, self._left - 1
        return Arrival(request, None, self._next if self._left else None)

    def _next(self, now: float) -> Arrival:
        pause = self._dice.expovariate(1.0 / self._kind.pause)
        return self._say(now + pause, prompt(self._number, lognormal(self._dice, self._kind.tool)))
