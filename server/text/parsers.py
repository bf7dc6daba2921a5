"""Which parsers read a model's answers, and one answer on its way through them. It knows no request and no HTTP.

text ─▶ reasoning stream ─ content ─▶ tool stream ─▶ Thought, text, CallDelta, BrokenCall in the order they came
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from turnout.compose.plugins import Plugins
from turnout.core import ModelError
from turnout.core.interfaces import Auto
from turnout.core.parsers import (
    BrokenCall,
    CallDelta,
    ReasoningParser,
    ReasoningStream,
    Thought,
    Tool,
    ToolParser,
    ToolStream,
)

Part = str | Thought | CallDelta | BrokenCall
DEFAULT = "hermes"  # for a template that teaches no format: what most models that were tuned for tools write


class Parsers(NamedTuple):
    """The parsers of a server, and their names. None: its texts are passed as they are."""

    tool: ToolParser | None = None
    reasoning: ReasoningParser | None = None
    tool_name: str = "none"
    reasoning_name: str = "none"


def chosen_parsers(tool: object, reasoning: object, names: Mapping[str, str], found: Plugins, template: str) -> Parsers:
    """The parsers that were configured, `auto` settled by the chat template. `names`: of the choices, by slot. Raises
    ModelError where two parsers say that the template is theirs."""
    tool_name, tool = _settled("tool_parser", names, tool, found, template, DEFAULT)
    reasoning_name, reasoning = _settled("reasoning_parser", names, reasoning, found, template, "none")
    return Parsers(
        None if tool_name == "none" else cast(ToolParser, tool),
        None if reasoning_name == "none" else cast(ReasoningParser, reasoning),
        tool_name,
        reasoning_name,
    )


def _settled(
    slot: str, names: Mapping[str, str], component: object, found: Plugins, template: str, default: str
) -> tuple[str, object]:
    """The name and the parser."""
    if not isinstance(component, Auto):
        return names[slot], component
    offered = {name: found.get(slot, name).component for name in found.names(slot) if name not in ("auto", "none")}
    fits = [name for name, kind in offered.items() if kind().fits(template)]
    if len(fits) > 1:
        raise ModelError(
            f"{slot}=auto: the model's chat template is said to be that of {' and of '.join(fits)}: choose one with "
            f"{slot}={fits[0]}, or {slot}=none"
        )
    name = fits[0] if fits else default
    return name, offered[name]() if name in offered else None


class Parts:
    """The parts of one answer. `most`: calls that are wanted; what the model calls beyond is left out."""

    def __init__(self, reasoning: ReasoningStream | None, tool: ToolStream | None, most: int | None = None) -> None:
        self._reasoning, self._tool, self._most = reasoning, tool, most
        self.num_reasoning = 0  # tokens of the reasoning; an output of several counts as a whole where it begins there
        self.num_broken = 0
        self._opened: set[int] = set()
        self._broken: set[int | None] = set()

    @property
    def reasons(self) -> bool:
        """Reasoning is expected."""
        return self._reasoning is not None and self._reasoning.expected

    @property
    def num_calls(self) -> int:
        """Whole calls, once the answer has ended."""
        return len(self._opened - self._broken)

    @property
    def called(self) -> bool:
        """There is a whole call. Meant for the end of an answer that was not cut."""
        return self.num_calls > 0

    def push(self, text: str, tokens: Sequence[int], finish: str | None) -> list[Part]:
        """What an output of the engine adds; `finish` with the last one."""
        split: list[Part] = [text] if text else []
        if self._reasoning is not None:
            if self._reasoning.thinking:
                self.num_reasoning += len(tokens)
            split = list(self._reasoning.feed(text, tokens))
            split += self._reasoning.finish() if finish else ()
        if self._tool is None:
            return split
        parts: list[Part] = []
        for part in split:
            parts += self._tool.feed(part, tokens) if isinstance(part, str) else (part,)
        if finish:
            parts += self._tool.finish(cut=finish == "length")
        return [part for part in parts if self._wanted(part)]

    def _wanted(self, part: Part) -> bool:
        if isinstance(part, BrokenCall):
            self.num_broken += 1
            self._broken.add(part.index)
        elif isinstance(part, CallDelta):
            if self._most is not None and part.index >= self._most:
                return False
            self._opened.add(part.index)
        return True


class CollectedParts:
    """All parts of an answer that is not a stream."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[CallDelta]] = {}

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, Thought):
                self._reasoning.append(part.text)
            elif isinstance(part, CallDelta):
                self._calls.setdefault(part.index, []).append(part)
            elif isinstance(part, BrokenCall):
                self._content.append(part.text)
                if part.index is not None:
                    self._calls.pop(part.index, None)
            else:
                self._content.append(part)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[tuple[CallDelta, str]]:
        """The first delta of each call, and its arguments."""
        return [(deltas[0], "".join(delta.arguments for delta in deltas)) for deltas in self._calls.values()]


def reading(
    parsers: Parsers, tools: Sequence[Tool] | None, prompt: str, prefill: str
) -> tuple[ReasoningStream | None, ToolStream | None]:
    """The streams of one answer. `tools`: the request's; None: calls are not read."""
    reasoning = None if parsers.reasoning is None else parsers.reasoning.start(prompt, prefill)
    return reasoning, None if tools is None or parsers.tool is None else parsers.tool.start(tools)
