"""Looks for traces that go wrong, and makes them short. Needs hypothesis.

    python -m turnout.testing.fuzz seconds=600 seed=1 scheduler=fcfs,priority blocks=radix

plays random traces, `traces` (200) for a seed and then the next, on the fake model over every scheduler, preemption policy and block manager that is installed, and over
a scheduler that shuffles. It prints the first fault as a test that can be pasted, and ends with 1; with 0 when there is
none.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

try:
    from hypothesis import HealthCheck, Phase, given, seed, settings
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("the fuzzer needs hypothesis: pip install 'turnout[test]'") from missing

from turnout.compose import plugins
from turnout.testing.chance import happenings, setups
from turnout.testing.shorten import shorten
from turnout.testing.shuffle import Shuffle
from turnout.testing.traces import Fault, Part, Play, Setup, watch
from turnout.testing.watched import Watched

SLOTS = ("scheduler", "preemption", "blocks")
PLAIN = {"scheduler": "fcfs", "preemption": "recompute", "blocks": "paged"}  # what a fault is best shown with
SHUFFLE = "shuffle"


@dataclass(frozen=True)
class Space:
    """Which components a search goes over, by slot; the plainest first."""

    scheduler: Sequence[type]
    preemption: Sequence[type]
    blocks: Sequence[type]


def installed(only: Mapping[str, Sequence[str]] | None = None, package: str | None = None) -> Space:
    """The components that are installed (by one package), or some of them by name; schedulers have `shuffle` too."""
    found = plugins.load()

    def components(slot: str) -> Sequence[type]:
        names = (only or {}).get(slot)
        if names is None:
            offered = [n for n in found.names(slot) if package in (None, found.get(slot, n).package)]
            names = sorted(offered, key=lambda name: (name != PLAIN[slot], name))
            names += [SHUFFLE] * (len(names) // 2) if slot == "scheduler" else []  # it meets more than others
        return [Shuffle if (slot, n) == ("scheduler", SHUFFLE) else found.get(slot, n).component for n in names]

    return Space(*(components(slot) for slot in SLOTS))


def search(
    space: Space, num_traces: int, start: int | None = None, passed: Callable[[Watched], None] | None = None
) -> Fault | None:
    """Play `num_traces` traces; the first fault is made as short as it gets. The same traces each time for one `start`,
    and for none. `passed` sees each engine that had no fault."""
    found: list[Fault] = []

    @settings(
        max_examples=num_traces,
        derandomize=start is None,
        database=None,
        deadline=None,
        phases=(Phase.generate,),  # it would make the random choices smaller; `shorten` does it to what they led to
        suppress_health_check=list(HealthCheck),
    )
    @given(setups(space.scheduler, space.preemption, space.blocks), happenings())
    def plays(setup: Setup, happens: Callable[[Play], None]) -> None:
        fault = watch(setup, happens, passed)
        if fault is not None:
            found.append(fault)
            raise _Found

    with _quiet():
        try:
            (plays if start is None else seed(start)(plays))()
        except _Found:
            return shorten(found[0], [Part(getattr(space, slot)[0]) for slot in SLOTS])
    return None


class _Found(Exception):
    """Ends a search."""


@contextmanager
def _quiet() -> Iterator[None]:
    """The engine tells of each forward pass that is made to fail."""
    log = logging.getLogger("turnout.engine")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


def main(arguments: Iterable[str]) -> int:
    """The command. 0: no fault in the time given; 1: one, printed; 2: the arguments are wrong."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    known = {"seconds", "seed", "traces", *SLOTS}
    try:
        if unknown := sorted(set(given) - known):
            raise ValueError(f"there is no {', '.join(unknown)}; the arguments are {', '.join(sorted(known))}")
        seconds, start = float(given.get("seconds", 60)), int(given.get("seed", time.time()))
        space = installed({slot: given[slot].split(",") for slot in SLOTS if slot in given})
    except (ValueError, plugins.PluginError) as error:
        print(f"turnout.testing.fuzz: {error}", file=sys.stderr)
        return 2
    end, batch, count = time.monotonic() + seconds, int(given.get("traces", 200)), 0
    while not count or time.monotonic() < end:
        fault = search(space, batch, start)
        if fault is not None:
            print(f"\nseed={start} traces={batch}: {fault.message}\n\n{fault.test}")
            return 1
        start, count = start + 1, count + batch
        print(f"\r{count} traces, {max(0, end - time.monotonic()):.0f} s left ", end="", file=sys.stderr, flush=True)
    print(f"\n{count} traces, no fault; the last seed was {start - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
