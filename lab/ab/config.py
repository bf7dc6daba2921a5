"""What `turnout ab` asks for: the schema of conf/ab.yaml. Importing it stores it for Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from turnout.compose.config import Config
from turnout.lab.compare.run import Settings
from turnout.lab.compare.verdict import Judging


@dataclass
class Effects:
    """What matters, by measure; null: by the coarser side's dtype. Raises ValueError naming the option."""

    kl: float | None = None  # nats a token, mean
    flips: float | None = None  # share of tokens whose likeliest changes and is no near tie
    greedy: float | None = None  # share of greedy writings that part, not at a near tie
    sampled: float | None = None  # share of sampled writings that part, beyond what the distributions explain
    surprise: float | None = (
        None  # nats a token by which sampled ones are more, or less, surprising than they should be
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ValueError(f"effects.{name} must be above 0, or null, got {value}")


@dataclass
class Judge:
    """How sure to be. Raises ValueError naming the option."""

    alpha: float = 0.01  # chance of "different" where the excess is at most the effect
    power: float = 0.9  # chance that the number of prompts asked for settles the question
    near_tie: float | None = None  # nats; flips with a smaller margin are benign; null: by dtype

    def __post_init__(self) -> None:
        Judging(self.alpha, self.power)
        if self.near_tie is not None and self.near_tie < 0:
            raise ValueError(f"judge.near_tie must not be negative, or null, got {self.near_tie}")


@dataclass
class AbConfig(Config):
    """Whether two compositions, servers or transformers give the same answers, and how fast one is beside the other.

    The engine's own keys hold for both sides.
    """

    a: str | None = None  # the baseline: "[KEY=VALUE, ...]", "url=http://...", or transformers; null: the defaults
    b: str = MISSING  # what is compared with it, likewise; several, separated by commas
    workload: str = (
        "auto"  # mixed, short, long_context, attention, facts, or a file; auto: attention where sides differ in that
    )
    num_prompts: int = 24  # compared
    max_tokens: int = 16  # of each continuation and each free writing
    num_top: int = 20  # likeliest tokens compared
    temperature: float = 0.8  # of sampled writing
    seed: int = 0  # of the order of requests, and of sampled writing
    rounds: int = 3  # of the race; 0: no speed
    api_key: str | None = None  # for sides that are servers
    out: str | None = None  # a JSON file to write
    html: str | None = None  # a page to write
    effects: Effects = field(default_factory=Effects)
    judge: Judge = field(default_factory=Judge)

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("max_tokens", 1), ("num_top", 1), ("rounds", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0.0 < self.temperature <= 100.0:
            raise ValueError(f"temperature must be above 0 and at most 100, got {self.temperature}")

    @property
    def settings(self) -> Settings:
        """The comparison's own."""
        return Settings(
            num_top=self.num_top,
            near_tie=self.judge.near_tie,
            effects={name: value for name, value in vars(self.effects).items() if value is not None},
            judging=Judging(self.judge.alpha, self.judge.power),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
        )


OWN = frozenset(AbConfig.__dataclass_fields__) - frozenset(Config.__dataclass_fields__)  # keys that are no engine's

for _name, _node in (("ab_schema", AbConfig), ("engine_schema", Config)):
    ConfigStore.instance().store(name=_name, node=_node, provider="turnout")
