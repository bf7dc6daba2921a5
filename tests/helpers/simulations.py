"""Small simulations for these tests: a constant second a step, unless said otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnout.compose.config import Limits
from turnout.core.hooks import new_hooks
from turnout.core.types import Request
from turnout.lab.simulate.config import SimulateConfig
from turnout.lab.simulate.latency import Constant
from turnout.lab.simulate.loop import Simulation
from turnout.lab.workload.arrivals import Arrival, prompt, sampling
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.preemption import Recompute
from turnout.plugins.scheduler import FCFS


@dataclass
class Listed:
    """A workload that is a list."""

    given: Sequence[Arrival] = field(default_factory=list)

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        yield from self.given

    def asked(self, factor: float, num_requests: int, seconds: float) -> float | None:
        return None

    def notes(self) -> list[str]:
        return []


def arrival(at: float, num_prompt: int, num_output: int, name: str = "") -> Arrival:
    """A request that shares no prefix with another of a different time or name."""
    name = name or f"at {at}"
    unique = int.from_bytes(name.encode()[-3:]) + 1
    return Arrival(Request(name, prompt(unique, num_prompt), sampling(num_output), at))


def shapes(found: list[Request]) -> list[tuple[float, int, int]]:
    """(arrival, prompt, answer) of each."""
    return [(round(r.arrived, 6), len(r.tokens), r.sampling.max_tokens) for r in found]


def simulation(
    *arrivals: Arrival, factor: float = 1.0, allowed: Mapping[str, int] | None = None, **options: Any
) -> Simulation:
    """Of these arrivals, or of `workload`; other options as in the configuration."""
    options = {
        "scheduler": FCFS(),
        "preemption": Recompute(),
        "blocks": PagedBlocks(block_size=4, num_blocks=100),
        "workload": Listed(arrivals),
        "latency": Constant(1.0),
        "limits": Limits(max_num_batched_tokens=64, max_num_seqs=8),
    } | options
    return Simulation(SimulateConfig(**options), new_hooks(), factor, allowed)
