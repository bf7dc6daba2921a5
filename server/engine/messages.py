"""What crosses between the server's process and the engine's, both ways. Plain data; it knows neither side.

A `Request` itself is the message that adds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from turnout.core.types import EngineInfo, Request, Stats


class Setup(NamedTuple):
    """To the engine's process, its first message."""

    config: Mapping[str, Any]  # as `turnout.compose.config.to_container` makes it
    builder: (
        str  # "module:function"; called with the configuration and a `worker.LoadingReporter`, it returns the engine
    )
    module_path: list[str]  # sys.path of the parent
    dies_with: int | None  # the parent's process id, when the kernel shall end this process with it
    log_level: int


class ParallelSampling(NamedTuple):
    """To the engine's process: several answers to one prompt, which travels once. `parallel.py` makes the requests."""

    request: Request  # of the first answer; the others fork its prompt's blocks
    answers: tuple[str, ...]  # ids of all, the first is the request's

    @property
    def id(self) -> str:
        return self.request.id


class BeamSearch(NamedTuple):
    """To the engine's process: find the likeliest answers to a prompt. `beam.py` has the rule."""

    request: (
        Request  # its sampling's max_tokens, min_tokens, stop_ids, logprobs and prompt_logprobs count, nothing else
    )
    answers: tuple[str, ...]  # ids the answers come under, best first; the first is the request's
    width: int  # beams followed at once, at least as many as answers
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def id(self) -> str:
        return self.request.id


class Abort(NamedTuple):
    """To the engine's process: end this request."""

    request_id: str


class Stop(NamedTuple):
    """To the engine's process: leave."""


class Question(NamedTuple):
    """To the engine's process: answered between two steps."""

    number: int  # comes back with the reply
    topic: str  # "request", "requests" or "engine": see Observers.answer
    name: str = ""


class Reply(NamedTuple):
    """From the engine's process: the answer to a question, plain values."""

    number: int
    answer: object


class Progress(NamedTuple):
    """From the engine's process, while loading."""

    stage: str
    share: float  # of the stage done, 0 to 1


class Found(NamedTuple):
    """From the engine's process, while loading: the model's files are all there."""

    path: str  # of the folder


class Alive(NamedTuple):
    """From the engine's process, every now and then while it has something to do."""

    overdue: str | None  # why its step must be taken to hang


class Ready(NamedTuple):
    """From the engine's process: requests are welcome."""

    info: EngineInfo


class Fatal(NamedTuple):
    """From the engine's process, its last message: why it ends."""

    reason: str


class Report(NamedTuple):
    """From the engine's process, after a step and after messages were handled."""

    handled: int  # messages since the start; when it equals what was sent, no answer is owed
    busy: bool
    outputs: list[tuple[Any, ...]]  # the fields of each Output: plain tuples pickle four times faster than named ones
    refused: list[tuple[str, str]]  # (request id, why)
    stats: Stats


Ask = Request | BeamSearch  # what an engine takes
Asked = Ask | ParallelSampling
ToEngine = Asked | Abort | Question | Stop
