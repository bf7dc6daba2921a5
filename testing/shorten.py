"""Makes a trace that goes wrong as short and as plain as it gets. It knows no search.

Calls name requests, not places in a list, so each can be left out without a change of meaning to the others; that is why
this is done on the calls, and not on the random choices they came from.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from turnout.testing.traces import Call, Fault, Options, Part, Setup, Trace, name_of, play
from turnout.testing.watched import Watched

DEFAULTS = {name: p.default for name, p in inspect.signature(Watched).parameters.items() if p.default is not p.empty}


def shorten(fault: Fault, plain: Iterable[Part]) -> Fault:
    """Leave out and simplify for as long as something goes wrong, be it something else. `plain`: the parts that a fault
    is best shown with."""
    while True:
        before = fault.trace
        fault = _fewer_calls(fault)
        fault = _improve(fault, lambda trace: (Trace(s, trace.calls) for s in _plainer_setups(trace.setup, plain)))
        for index in range(len(fault.trace.calls) - 1, -1, -1):
            fault = _improve(fault, partial(_with_plainer_call, index))
        if fault.trace == before:
            return _renamed(fault)


def _fewer_calls(fault: Fault) -> Fault:
    """Leave out as many calls as can be, long runs of them first."""
    size = len(fault.trace.calls)
    while size:
        start = len(fault.trace.calls) - size
        while start >= 0:
            calls = fault.trace.calls
            fault = play(Trace(fault.trace.setup, calls[:start] + calls[start + size :])) or fault
            start = min(start, len(fault.trace.calls)) - size
        size //= 2
    return fault


def _improve(fault: Fault, plainer: Callable[[Trace], Iterator[Trace]]) -> Fault:
    """The first plainer trace that goes wrong too, and so on with that."""
    while better := next((found for trace in plainer(fault.trace) if (found := play(trace))), None):
        fault = better
    return fault


def _plainer_setups(setup: Setup, plain: Iterable[Part]) -> Iterator[Setup]:
    for spec, part in zip(dataclasses.fields(setup), plain, strict=False):
        current: Part = getattr(setup, spec.name)
        if current.component is not part.component:
            known = {option.name for option in dataclasses.fields(part.component)}
            kept = tuple(option for option in current.options if option[0] in known)
            yield setup.having(spec.name, Part(part.component, kept))
        for options in _plainer_options(current.options):
            yield setup.having(spec.name, Part(current.component, options))
    for name, default in DEFAULTS.items():
        value = getattr(setup, name)
        if value != default:
            yield setup.having(name, default)
            for smaller in _smaller(value, least=1):
                yield setup.having(name, smaller)


def _with_plainer_call(index: int, trace: Trace) -> Iterator[Trace]:
    if index < len(trace.calls):
        for call in _plainer_calls(trace.calls[index]):
            yield Trace(trace.setup, (*trace.calls[:index], call, *trace.calls[index + 1 :]))


def _plainer_calls(call: Call) -> Iterator[Call]:
    for options in _plainer_options(call.options):
        yield Call(call.name, call.args, options)
    if call.name == "fail" and call.args != ("before",):
        yield Call(call.name, ("before",))
    if call.name != "add":
        return
    rid, tokens = call.args
    assert isinstance(tokens, list)
    if tokens != (counted := list(range(1, len(tokens) + 1))):
        yield Call(call.name, (rid, counted), call.options)
    for size in (len(tokens) // 2, 1):
        for start in range(len(tokens) - size, -1, -1) if 0 < size < len(tokens) else ():
            yield Call(call.name, (rid, tokens[:start] + tokens[start + size :]), call.options)


def _plainer_options(options: Options) -> Iterator[Options]:
    for i, (name, value) in enumerate(options):
        yield options[:i] + options[i + 1 :]
        for smaller in _smaller(value, least=0):
            yield (*options[:i], (name, smaller), *options[i + 1 :])


def _smaller(value: object, least: int) -> list[int]:
    if isinstance(value, bool) or not isinstance(value, int) or value <= least:
        return []
    return sorted({least, (value + least) // 2, value - 1})


def _renamed(fault: Fault) -> Fault:
    """With the ids a, b, c, in order."""
    names: dict[object, str] = {}

    def renamed(call: Call) -> Call:
        about = call.name in ("add", "abort", "drop")
        args = tuple(name(arg) if about and i == 0 else arg for i, arg in enumerate(call.args))
        return Call(call.name, args, tuple((k, name(v) if k == "parent" else v) for k, v in call.options))

    def name(rid: object) -> str:
        return names.setdefault(rid, name_of(len(names)))

    trace = fault.trace
    return play(Trace(trace.setup, tuple(renamed(call) for call in trace.calls))) or fault
