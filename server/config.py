"""What each command asks for beside the engine: the schemas of conf/. Importing it stores them for Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore

from turnout.core.config import Config


@dataclass
class ServerConfig:
    """The HTTP side. Raises ValueError naming the option."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None  # null: the model as named
    api_key: str | None = None  # asked for on /v1 routes, as a bearer token
    max_queue: int | None = None  # waiting requests beyond it get 429
    drain_timeout: float = 30.0  # seconds that running requests have to end after the first Ctrl-C
    stall_timeout: float = 60.0  # seconds without a finished step after which a busy engine counts as frozen; 0: never
    log_requests: bool = False
    generation_config: str = "auto"  # auto: the model's own sampling defaults apply; none: OpenAI's alone
    metrics_compat: list[str] = field(default_factory=lambda: ["v0", "v1"])
    cors_origins: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"server.port must be between 0 and 65535, got {self.port}")
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"server.generation_config must be auto or none, got {self.generation_config!r}")
        if self.api_key == "":  # as an unset variable of the shell makes it
            raise ValueError("server.api_key must not be empty: give a key, or leave it out to ask for none")
        if set(self.metrics_compat) - {"v0", "v1"}:
            raise ValueError(f"server.metrics_compat may hold v0 and v1, got {self.metrics_compat}")
        if self.max_queue is not None and self.max_queue < 1:
            raise ValueError(f"server.max_queue must be at least 1, or null, got {self.max_queue}")
        for name in ("drain_timeout", "stall_timeout"):
            if getattr(self, name) < 0:
                raise ValueError(f"server.{name} must not be negative, got {getattr(self, name)}")


@dataclass
class SamplingConfig:
    """How `generate` and `chat` sample; null: the model's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    ignore_eos: bool = False
    stop: list[str] = field(default_factory=list)
    generation_config: str = "auto"  # auto: the model's own sampling defaults apply; none: OpenAI's alone

    def __post_init__(self) -> None:
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"sampling.generation_config must be auto or none, got {self.generation_config!r}")
        if "" in self.stop:
            raise ValueError("sampling.stop must not hold an empty text: every answer would end at once")


@dataclass
class ServeConfig(Config):
    """`turnout serve`."""

    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class GenerateConfig(Config):
    """`turnout generate`."""

    prompt: str | None = None  # null: the first argument, or standard input
    chat: bool = False  # put the prompt through the chat template
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass
class ChatConfig(Config):
    """`turnout chat`."""

    system: str | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


for _name, _node in (("serve_schema", ServeConfig), ("generate_schema", GenerateConfig), ("chat_schema", ChatConfig)):
    ConfigStore.instance().store(name=_name, node=_node, provider="turnout")
