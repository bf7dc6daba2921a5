"""What each command asks for beside the engine: the schemas of conf/. Importing it stores them for Hydra."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from hydra.core.config_store import ConfigStore

from turnout.compose.config import Config
from turnout.core.types import StructuredSpec, Whitespace

FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")  # what says the form of an answer


@dataclass
class ServerConfig:
    """The HTTP side. Raises ValueError naming the option."""

    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0: every one of this machine
    port: int = 8000  # 0: any that is free
    served_model_name: str | None = None  # null: the model as named
    model_aliases: list[str] = field(default_factory=list)  # other names that requests may give the model
    api_key: str | None = None  # asked for on every route but /health, /ping and /metrics, as a bearer token
    allowed_hosts: list[str] = field(
        default_factory=list
    )  # public names of this machine, where no key is asked; "*": any
    client_scheduling: bool = False  # requests may say how they are scheduled: priority, and metadata as labels
    max_queue: int | None = None  # waiting requests beyond it get 429
    max_connections: int | None = None  # null: what the limit on open files leaves
    keep_alive: float = 120.0  # seconds an idle connection stays open: longer than a proxy in front keeps it
    request_timeout: float = 60.0  # seconds a client has to send a request
    drain_timeout: float = 30.0  # seconds that running requests have to end after the first Ctrl-C
    stall_timeout: float = 60.0  # seconds without a sign of life after which a busy engine counts as frozen; 0: never
    on_engine_death: str = (
        "exit"  # exit: the server ends, with code 70, for a supervisor; restart: the engine comes back
    )
    log_requests: bool = False  # a line on stderr for each
    debug: bool = False  # /debug/requests and /debug/engine show what the engine does and why
    generation_config: str = "auto"  # auto: the model's own sampling defaults apply; none: OpenAI's alone
    json_whitespace: str = "compact"  # in JSON that has a form: compact (none), or any, as the model likes
    metrics_compat: list[str] = field(default_factory=lambda: ["v0", "v1"])  # whose older names /metrics repeats
    cors_origins: list[str] = field(default_factory=list)  # web pages that may call from a browser

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"server.port must be between 0 and 65535, got {self.port}")
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"server.generation_config must be auto or none, got {self.generation_config!r}")
        if self.json_whitespace not in get_args(Whitespace):
            raise ValueError(f"server.json_whitespace must be compact or any, got {self.json_whitespace!r}")
        if self.on_engine_death not in ("exit", "restart"):
            raise ValueError(f"server.on_engine_death must be exit or restart, got {self.on_engine_death!r}")
        if self.api_key == "":  # as an unset variable of the shell makes it
            raise ValueError("server.api_key must not be empty: give a key, or leave it out to ask for none")
        if set(self.metrics_compat) - {"v0", "v1"}:
            raise ValueError(f"server.metrics_compat may hold v0 and v1, got {self.metrics_compat}")
        if self.max_queue is not None and self.max_queue < 1:
            raise ValueError(f"server.max_queue must be at least 1, or null, got {self.max_queue}")
        if self.max_connections is not None and self.max_connections < 1:
            raise ValueError(f"server.max_connections must be at least 1, or null, got {self.max_connections}")
        for name in ("keep_alive", "request_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"server.{name} must be above 0, got {getattr(self, name)}")
        for name in ("drain_timeout", "stall_timeout"):
            if getattr(self, name) < 0:
                raise ValueError(f"server.{name} must not be negative, got {getattr(self, name)}")

    @property
    def whitespace(self) -> Whitespace:
        return "any" if self.json_whitespace == "any" else "compact"


@dataclass
class SamplingConfig:
    """How `generate` and `chat` sample; null: the model's own default."""

    temperature: float | None = None  # 0: the likeliest token each time
    top_p: float | None = None  # the likeliest tokens that make up this probability
    top_k: int | None = None  # so many of the likeliest tokens
    min_p: float | None = None  # tokens at least so likely, beside the likeliest
    repetition_penalty: float | None = None  # above 1: tokens of prompt and answer become less likely
    presence_penalty: float = 0.0  # taken from the logits of tokens the answer has
    frequency_penalty: float = 0.0  # likewise, for each time it has them
    seed: int | None = None  # the same seed draws the same tokens
    max_tokens: int = 256  # of the answer
    ignore_eos: bool = False  # write on where the model would end
    stop: list[str] = field(default_factory=list)  # texts that end an answer
    n: int = 1  # answers
    best_of: int | None = None  # answers made, of which the n with the best mean log-probability are shown; null: n
    use_beam_search: bool = False  # the likeliest answers instead of drawn ones
    beam_width: int | None = None  # answers followed at once; null: n
    length_penalty: float = 1.0  # above 1 a beam search prefers longer answers
    early_stopping: bool | str = False  # when a beam search ends: false, true or never
    generation_config: str = "auto"  # auto: the model's own sampling defaults apply; none: OpenAI's alone
    json_schema: str | None = None  # the form of the answer: a schema, as JSON or the name of a file that holds it
    json_object: bool = False  # any JSON object
    regex: str | None = None  # an expression for the whole answer
    choice: list[str] = field(default_factory=list)  # the answer is one of these texts
    grammar: str | None = None  # in Lark or GBNF, or the name of a file that holds it
    json_whitespace: str = "compact"  # or any

    def __post_init__(self) -> None:
        self._check_form()
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"sampling.generation_config must be auto or none, got {self.generation_config!r}")
        if "" in self.stop:
            raise ValueError("sampling.stop must not hold an empty text: every answer would end at once")
        if self.n < 1:
            raise ValueError(f"sampling.n must be at least 1, got {self.n}")
        if self.num_made < self.n:
            name = "beam_width" if self.use_beam_search else "best_of"
            raise ValueError(f"sampling.{name} must be at least sampling.n, {self.n}, got {self.num_made}")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"sampling.early_stopping must be true, false or never, got {self.early_stopping!r}")
        if not -10 <= self.length_penalty <= 10:
            raise ValueError(f"sampling.length_penalty must be between -10 and 10, got {self.length_penalty}")
        self._check_beam()

    def _check_form(self) -> None:
        given = [name for name in FORMS if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"an answer has one form: set sampling.{given[0]} or sampling.{given[1]}, not both")
        if self.json_whitespace not in get_args(Whitespace):
            raise ValueError(f"sampling.json_whitespace must be compact or any, got {self.json_whitespace!r}")

    @property
    def structured(self) -> StructuredSpec | None:
        """The form of the answer. Raises ValueError for a file that can't be read."""
        kind = next((name for name in FORMS if getattr(self, name)), None)
        if kind is None:
            return None
        value = getattr(self, kind)
        if kind in ("json_schema", "grammar") and "\n" not in value and Path(value).is_file():
            value = Path(value).read_text(encoding="utf-8")
        text = "" if kind == "json_object" else json.dumps(value) if kind == "choice" else value
        return StructuredSpec(kind, text, "any" if self.json_whitespace == "any" else "compact")  # type: ignore[arg-type]

    def _check_beam(self) -> None:
        """Options that have no meaning with a beam search, or without one."""
        with_beam: dict[str, tuple[object, ...]] = {
            "temperature": (None, 0),
            "repetition_penalty": (None, 1),
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "stop": ([],),
            "best_of": (None,),
        }
        without: dict[str, tuple[object, ...]] = {
            "beam_width": (None,),
            "length_penalty": (1,),
            "early_stopping": (False,),
        }
        for name, neutral in (with_beam if self.use_beam_search else without).items():
            if getattr(self, name) not in neutral:
                goes = "does not go with" if self.use_beam_search else "needs"
                raise ValueError(f"sampling.{name}={getattr(self, name)} {goes} sampling.use_beam_search=true")

    @property
    def num_made(self) -> int:
        """Answers made; in a beam search, its width."""
        made = self.beam_width if self.use_beam_search else self.best_of
        return self.n if made is None else made


@dataclass
class Recorded(Config):
    """An engine that can be recorded."""

    record: str | None = None  # a file: all that the engine is asked and does, for turnout replay, why, trace, simulate
    record_limit: int = 2**30  # bytes; the recording stops there, the engine goes on

    def __post_init__(self) -> None:
        if self.record == "":
            raise ValueError("record must name a file, or be null")
        if self.record_limit < 1:
            raise ValueError(f"record_limit must be at least 1 byte, got {self.record_limit}")


@dataclass
class ServeConfig(Recorded):
    """An OpenAI-compatible server."""

    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class GenerateConfig(Recorded):
    """Completes a prompt here, without a server. Text behind `--` is a prompt whatever it looks like; none: standard input."""

    prompt: str | None = None  # null: the first argument, or standard input
    chat: bool = False  # put the prompt through the chat template
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass
class ChatConfig(Config):
    """A chat in this terminal."""

    system: str | None = None  # what the model is told before the chat
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        if self.sampling.n != 1:
            raise ValueError(f"sampling.n must be 1 in a chat, which goes on from one answer, got {self.sampling.n}")


for _name, _node in (("serve_schema", ServeConfig), ("generate_schema", GenerateConfig), ("chat_schema", ChatConfig)):
    ConfigStore.instance().store(name=_name, node=_node, provider="turnout")
