"""A trace: one composition and the calls made of it, as data. It can be played, and printed as a test."""

from __future__ import annotations

import dataclasses
import inspect
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from turnout.testing.watched import Watched

Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Part:
    """A component and its options."""

    component: type
    options: Options = ()

    def build(self) -> Any:
        return self.component(**dict(self.options))

    @property
    def code(self) -> str:
        return f"{self.component.__qualname__}({', '.join(f'{name}={_code(value)}' for name, value in self.options)})"

    @property
    def names(self) -> set[tuple[str, str]]:
        """(module, name) of what `code` needs."""
        values = [type(value) for _, value in self.options if isinstance(value, Enum)]
        return {(t.__module__, t.__qualname__) for t in (self.component, *values)}


def _code(value: object) -> str:
    return f"{type(value).__qualname__}.{value.name}" if isinstance(value, Enum) else _quoted(repr(value))


def _quoted(text: str) -> str:
    """As the formatter quotes."""
    return text if '"' in text else text.replace("'", '"')


@dataclass(frozen=True)
class Setup:
    """What is built, and how small it is."""

    scheduler: Part
    preemption: Part
    blocks: Part
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    tick: float  # seconds a look at the clock takes

    def build(self) -> Watched:
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return Watched(**{name: value.build() if isinstance(value, Part) else value for name, value in values.items()})

    def having(self, name: str, value: Any) -> Setup:
        """The same but for one field."""
        return dataclasses.replace(self, **{name: value})

    @property
    def code(self) -> Iterator[str]:
        """Lines that import what is needed and make `engine`."""
        names = {("turnout.testing.watched", "Watched")}
        names |= self.scheduler.names | self.preemption.names | self.blocks.names
        for module in sorted({module for module, _ in names}):
            yield f"from {module} import {', '.join(sorted(name for m, name in names if m == module))}"
        yield ""
        yield "engine = Watched("
        yield f"    {self.scheduler.code},"
        for spec in dataclasses.fields(self)[1:]:
            value, parameter = getattr(self, spec.name), inspect.signature(Watched).parameters[spec.name]
            if value != parameter.default:
                yield f"    {spec.name}={value.code if isinstance(value, Part) else repr(value)},"
        yield ")"


@dataclass(frozen=True)
class Call:
    """A call of `Watched`."""

    name: str
    args: tuple[object, ...] = ()
    options: Options = ()

    def __call__(self, engine: Watched) -> None:
        getattr(engine, self.name)(*self.args, **dict(self.options))

    @property
    def code(self) -> str:
        given = [_code(arg) for arg in self.args] + [f"{name}={_code(value)}" for name, value in self.options]
        return f"engine.{self.name}({', '.join(given)})"


STEP = Call("step")
FINISH = Call("finish")


@dataclass(frozen=True)
class Trace:
    setup: Setup
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Fault:
    """A trace that goes wrong with its last call, and how."""

    trace: Trace
    message: str

    @property
    def test(self) -> str:
        """A function of pytest that plays the trace."""
        doc = self.message.replace("\\", "\\\\").replace('"', "'").rstrip()
        lines = (*self.trace.setup.code, *_lines(self.trace.calls))
        body = "\n".join(f"    {line}".rstrip() for line in (f'"""{doc}"""', *lines))
        return f"def test_found_by_the_fuzzer() -> None:\n{body}\n"


def _lines(calls: Sequence[Call]) -> Iterator[str]:
    """One for each call, but for steps in a row."""
    steps = 0
    for call in calls:
        if call == STEP:
            steps += 1
            continue
        if steps:
            yield _steps(steps).code
        steps = 0
        yield call.code
    if steps:
        yield _steps(steps).code


def _steps(count: int) -> Call:
    return STEP if count == 1 else Call("step", (count,))


def play(trace: Trace) -> Fault | None:
    """Play a trace to its first fault."""

    def happens(playing: Play) -> None:
        for call in trace.calls:
            playing.call(call)

    return watch(trace.setup, happens)


def watch(
    setup: Setup, happens: Callable[[Play], object], passed: Callable[[Watched], None] | None = None
) -> Fault | None:
    """Let things happen to a new engine, up to the first fault. `passed` sees an engine that had none. Options that
    refuse each other are no fault."""
    try:
        playing = Play(setup)
    except ValueError:
        return None
    try:
        happens(playing)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the fault
        return Fault(Trace(setup, tuple(playing.calls)), f"{type(error).__name__}: {error}")
    if passed is not None:
        passed(playing.engine)
    return None


class Play:
    """An engine, and the calls made of it so far."""

    def __init__(self, setup: Setup) -> None:
        self.engine = setup.build()
        self.calls: list[Call] = []
        self.ids: list[str] = []  # of requests, in order; one may come again

    def call(self, call: Call) -> None:
        self.calls.append(call)
        if call.name == "add":
            self.ids.append(str(call.args[0]))
        call(self.engine)

    def pick(self, which: int) -> str | None:
        """The `which`-th last id."""
        return self.ids[-1 - which % len(self.ids)] if self.ids else None

    def new_id(self) -> str:
        return name_of(len(set(self.ids)))


def name_of(number: int) -> str:
    """a, b, … z, a1, b1, …"""
    return string.ascii_lowercase[number % 26] + (str(number // 26) if number >= 26 else "")
