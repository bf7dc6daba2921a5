"""What `turnout simulate` asks for: the schema of conf/simulate.yaml. Importing it stores it for Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from turnout.core.types import Limits
from turnout.lab.simulate.analytic import Analytic
from turnout.lab.simulate.latency import Constant, Fitted
from turnout.lab.workload import synthetic
from turnout.lab.workload.agents import Agents
from turnout.lab.workload.trace import TraceFile

WORKLOADS = {
    "chat": synthetic.Chat,
    "poisson": synthetic.Poisson,
    "bursts": synthetic.Bursts,
    "agents": Agents,
    "shared_prefix": synthetic.SharedPrefix,
    "long_documents": synthetic.LongDocuments,
    "mixed": synthetic.Mixed,
    "interference": synthetic.Interference,
    "trace": TraceFile,
}
LATENCIES = {"analytic": Analytic, "fitted": Fitted, "constant": Constant}
SLOTS = ("scheduler", "preemption", "blocks")  # the parts that are simulated


@dataclass
class Target:
    """What a request should meet to count as good. Raises ValueError naming the option."""

    ttft: float | None = 1.0  # seconds to its first token
    itl: float | None = 0.1  # seconds between its tokens, on average

    def __post_init__(self) -> None:
        _above_zero(self, "target")


@dataclass
class Capacity:
    """The most load that keeps every bound given; all null: not asked. Raises ValueError naming the option."""

    ttft_p99: float | None = None  # seconds
    itl_p99: float | None = None
    e2e_p99: float | None = None
    precision: float = 0.02  # relative, of the rate found

    def __post_init__(self) -> None:
        _above_zero(self, "capacity")

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds at p99, by measure."""
        given = {"ttft": self.ttft_p99, "itl": self.itl_p99, "e2e": self.e2e_p99}
        return {name: bound for name, bound in given.items() if bound is not None}


@dataclass
class SimulateConfig:
    """The real scheduler, preemption and block manager under a virtual clock, without a model."""

    scheduler: Any = MISSING
    preemption: Any = MISSING
    blocks: Any = MISSING
    workload: Any = MISSING
    latency: Any = MISSING
    limits: Limits = field(default_factory=Limits)
    target: Target = field(default_factory=Target)
    capacity: Capacity = field(default_factory=Capacity)
    window: float = 10.0  # seconds over which fairness compares the service of tenants
    out: str | None = None  # a JSON file to write
    plot: str | None = None  # a picture to write: .svg, .png or .pdf

    def __post_init__(self) -> None:
        if self.window <= 0:
            raise ValueError(f"window must be above 0, got {self.window}")


def _above_zero(section: object, prefix: str) -> None:
    for name, value in vars(section).items():
        if value is not None and value <= 0:
            raise ValueError(f"{prefix}.{name} must be above 0, or null, got {value}")


def _store() -> None:
    store = ConfigStore.instance()
    store.store(name="simulate_schema", node=SimulateConfig, provider="turnout")
    for group, choices in (("workload", WORKLOADS), ("latency", LATENCIES)):
        for name, node in choices.items():
            store.store(group=group, name=name, node=node, provider="turnout")


_store()
