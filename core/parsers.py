"""The contracts of the parts that read a model's answer as text: its tool calls, its reasoning.

They run in the HTTP server's process, know text and token ids, and neither the engine nor HTTP. A parser is a dataclass
as every component; its streams are made one for each answer. What a stream returns may depend on what the text is, never
on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "BrokenCall", "CallDelta", "CallForm", "ParameterForm", "ReasoningParser", "ReasoningStream", "Thought", "Tool",
    "ToolParser", "ToolStream", "overlap",
]  # fmt: skip

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters", "strict"}}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. A call's first one has its name, and no arguments."""

    index: int  # counts the answer's calls from 0
    name: str | None = None
    arguments: str = ""  # JSON; never cut inside an escape
    id: str | None = None  # with the first, where the format has ids of its own


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call that is none: the model wrote what its format does not allow."""

    index: int | None  # of the call that was opened before it broke; None: none was
    text: str  # what the model wrote of it; what follows comes as content


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


class ToolStream(Protocol):
    """Reads the calls of one answer."""

    def feed(self, text: str, tokens: Sequence[int]) -> Sequence[str | CallDelta | BrokenCall]:
        """What is certain now, in order; plain strings are content. `text` may lag behind `tokens`."""

    def finish(self, cut: bool) -> Sequence[str | CallDelta | BrokenCall]:
        """The rest. `cut`: the answer met its length limit, so an unfinished call is not a broken one."""


class ReasoningStream(Protocol):
    """Tells the reasoning of one answer from its content."""

    thinking: bool  # what comes now is reasoning
    expected: bool  # the answer will hold reasoning, so that grammars wait for its end

    def feed(self, text: str, tokens: Sequence[int]) -> Sequence[str | Thought]:
        """What is certain now, in order; plain strings are content."""

    def finish(self) -> Sequence[str | Thought]:
        """The rest."""


@dataclass(frozen=True)
class ParameterForm:
    """How a format without JSON writes one argument. `{key}` stands for the parameter's name."""

    begin: str
    end: str = ""
    between: str = ""
    quote: str | None = None  # around strings, which are raw text; "": nothing is. None: strings are JSON's


@dataclass(frozen=True)
class CallForm:
    """How a format writes calls, for grammars: before begin ARGUMENTS end (between begin ARGUMENTS end)… after.

    `{name}` stands for the function's name in `begin`, `{index}` for the call's place.
    """

    begin: str
    end: str
    before: str = ""
    between: str = ""
    after: str = ""
    parameters: ParameterForm | None = None  # None: ARGUMENTS is a JSON object
    most: int | None = None  # calls in one answer; None: any number
    follows: str | None = None  # where there is reasoning, forced calls begin after this; None: after its end


class ToolParser(Protocol):
    """One way in which models write tool calls."""

    @property
    def markers(self) -> Sequence[str]:
        """Special tokens of the format, which stay in the text the streams read."""

    def fits(self, template: str) -> bool:
        """Whether this chat template teaches the format. `tool_parser=auto` takes the parser that says so."""

    def start(self, tools: Sequence[Tool]) -> ToolStream:
        """For an answer to a request with these tools."""

    def form(self, template: str) -> CallForm | None:
        """How a grammar makes a model with this chat template write calls. None: calls can't be forced."""


class ReasoningParser(Protocol):
    """One way in which models write their reasoning."""

    @property
    def markers(self) -> Sequence[str]:
        """Special tokens of the format, which stay in the text the streams read."""

    @property
    def end(self) -> str:
        """The text that ends the reasoning, after which grammars apply."""

    def fits(self, template: str) -> bool:
        """Whether this chat template teaches the format. `reasoning_parser=auto` takes the parser that says so."""

    def start(self, prompt: str, prefill: str) -> ReasoningStream:
        """For an answer. `prompt`: the rendered prompt; `prefill`: the text of the answer that the client has given, with
        which the prompt ends and which the model goes on with."""


def overlap(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    for size in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        if any(marker.startswith(text[-size:]) and len(marker) > size for marker in markers):
            return size
    return 0
