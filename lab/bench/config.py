"""What `turnout bench` asks for: the schema of conf/bench.yaml. Importing it stores it for Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from turnout.compose.config import Config
from turnout.lab.bench.summary import LATENCIES, PERCENTILES
from turnout.lab.simulate.config import Target  # stores the workloads too
from turnout.lab.workload.synthetic import Interference

AXES = tuple(f"{name}.{share}" for name in LATENCIES for share in PERCENTILES)


@dataclass
class Remote:
    """How to ask over HTTP. Raises ValueError naming the option."""

    api_key: str | None = None
    model_name: str | None = None  # in requests; null: the first that the server lists
    vocab_size: int | None = None  # token ids are below it; null: what the server says
    max_model_len: int | None = None  # tokens of prompt and answer; null: what the server says
    ignore_eos: bool = True  # ask for answers of full length; false where the server refuses the field
    timeout: float = 600.0  # seconds of silence after which a request counts as failed
    calibrate: bool = True  # measure the generator itself against a server that computes nothing

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_model_len", "timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"remote.{name} must be above 0, got {value}")


@dataclass
class Equality:
    """What `ab=true` compares answers on. Raises ValueError naming the option."""

    workload: str = "short"  # of turnout ab: mixed, short, long_context, facts, or a file
    num_prompts: int = 24
    max_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"equality.{name} must be at least 1, got {getattr(self, name)}")


@dataclass
class BenchConfig(Config):
    """How fast a composition is, here or behind remote.url."""

    url: str | None = None  # a running server to measure, ours or any that speaks OpenAI's API; null: an engine here
    serve: bool = False  # start a server with this composition, measure it over HTTP, stop it
    workload: Any = MISSING
    concurrency: int | None = None  # clients in a closed loop; null: the workload's own arrivals
    max_seconds: float | None = 30.0  # of a repetition: later no request is sent; those open end; null: no limit
    warmup: int = 4  # requests before the first repetition, measured by nobody
    repetitions: int = 3  # of the whole load, each with prompts no cache has seen
    temperature: float = 0.0
    threads: int | None = None  # of the engine's computing; null: torch's own choice
    remote: Remote = field(default_factory=Remote)
    target: Target = field(default_factory=Target)
    pareto: str = "itl.p99"  # the latency against which throughput stands
    ab: bool = False  # compare each composition's answers with those of the first
    equality: Equality = field(default_factory=Equality)
    out: str | None = None  # a JSON file to write
    markdown: str | None = None  # a Markdown file to write
    plot: str | None = None  # a picture to write: .svg, .png or .pdf

    def __post_init__(self) -> None:
        if self.url is not None and self.serve:
            raise ValueError("url is a server that runs already, serve=true starts one: give one of both")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
        for name, least in (("concurrency", 1), ("warmup", 0), ("repetitions", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(f"max_seconds must be above 0, or null, got {self.max_seconds}")
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must be between 0 and 2, got {self.temperature}")
        if self.pareto not in AXES:
            raise ValueError(f"pareto must be one of {', '.join(AXES)}, got {self.pareto!r}")
        if self.ab and self.over_http:
            raise ValueError("ab=true compares engines in this process: leave url and serve out, or use turnout ab")
        if self.concurrency is not None and isinstance(self.workload, Interference):
            raise ValueError(
                "concurrency does not go with workload=interference: workload.streams says how many clients"
            )

    @property
    def over_http(self) -> bool:
        return self.url is not None or self.serve


ConfigStore.instance().store(name="bench_schema", node=BenchConfig, provider="turnout")
