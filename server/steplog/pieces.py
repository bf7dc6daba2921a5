"""What an account is made of: pieces of a request's time, the record of a request, a step as an account wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from turnout.core.types import Request
from turnout.server.steplog.events import Finished

NEXT_STEP = "until the next step began"
OTHERS = "behind others"
PARENT = "its parent's prompt comes first"
LEFT_OUT = "the step had no room for it"
VARIOUS = "various reasons"

QUEUED, PREFILL, DECODE, IDLE = "queued", "prefill", "decode", "left out"
PREEMPTED = {"recompute": "preempted (recompute)", "swap": "preempted (swap)"}


@dataclass(slots=True)
class Piece:
    """One stretch of a request's time; `times` of the same kind are one piece when there were too many to keep."""

    what: str
    reason: str
    began: float  # seconds on the engine's clock
    seconds: float
    steps: int  # that ended in it
    in_steps: float  # seconds of those steps; the rest passed between steps
    beside_prompts: float  # of these, in steps that computed a prompt
    times: int = 1

    def add(self, other: Piece) -> None:
        self.seconds += other.seconds
        self.steps += other.steps
        self.in_steps += other.in_steps
        self.beside_prompts += other.beside_prompts
        self.times += other.times


@dataclass(slots=True, eq=False)
class Record:
    """What is known of one request."""

    id: str
    arrived: float
    num_prompt: int
    labels: Mapping[str, str]
    request: Request | None  # while it is open, where there is one
    what: str = QUEUED
    reason: str = NEXT_STEP
    since: float = 0.0
    mark: tuple[int, float, float] = (0, 0.0, 0.0)  # the account's counts then
    pieces: list[Piece] = field(default_factory=list)
    first_token_at: float | None = None
    ended_at: float | None = None
    end: Finished | None = None

    @property
    def computes(self) -> bool:
        return self.what in (PREFILL, DECODE)


class Seen(NamedTuple):
    """A step, as an account wants it."""

    began: float
    ended: float
    chunks: Sequence[tuple[str, int, int, bool]]  # of requests in `special`: id, start, number of tokens, samples
    num_chunks: int  # of all requests
    preempted: Sequence[tuple[str, str]]  # request id, "recompute" or "swap"
    reasons: Mapping[str, str]
    finished: Sequence[Finished]
    everybody: Callable[[], set[str]]  # ids of all chunks; asked for only when somebody was left out


class Load(NamedTuple):
    """What a step computed."""

    prefill_tokens: int
    decodes: int
