"""What `turnout tune` asks for: the schema of conf/tune.yaml. Importing it stores it for Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from turnout.compose.config import Config
from turnout.lab.bench.config import Equality
from turnout.lab.tune.goal import Goal


@dataclass
class TuneConfig(Config):
    """Looks for a better composition for a workload and a goal. The engine's own keys are the baseline."""

    workload: Any = MISSING
    target: Goal = field(default_factory=Goal)
    clients: int = 8  # of a workload that has no arrivals of its own
    max_requests: int = 60  # of the workload, in each run
    repetitions: int = 2  # of each run on the engine
    gain: float = 0.03  # a change must be better by so much, relative
    trust: float = 0.2  # the simulator may be wrong by so much, relative; else every candidate is measured
    variables: list[str] = field(default_factory=list)  # what to change, in this order; empty: everything there is
    threads: int | None = None  # of the engine's computing; null: torch's own choice
    equality: Equality = field(default_factory=Equality)  # answers of the result against the baseline's
    composition: str = "experiment/tuned.yaml"  # the file to write the result to
    out: str | None = None  # a JSON file with the evidence
    markdown: str | None = None  # a Markdown file with the evidence

    def __post_init__(self) -> None:
        for name in ("clients", "max_requests", "repetitions", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("gain", "trust"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")


ConfigStore.instance().store(name="tune_schema", node=TuneConfig, provider="turnout")
