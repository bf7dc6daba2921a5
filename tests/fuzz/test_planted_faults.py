"""The fuzzer finds the faults that allocators are known to have, and prints each as a short test that shows it."""

from __future__ import annotations

import re
from collections.abc import Callable

import planted
import pytest

from turnout.core import engine
from turnout.plugins.preemption import Swap
from turnout.testing.fuzz import Space, installed, search
from turnout.testing.shuffle import Shuffle
from turnout.testing.traces import Fault

TRACES = 1000  # no fault takes more than 200
BLOCKS = (
    planted.DoubleFree,
    planted.EarlyPublish,
    planted.FailedButSettled,
    planted.ForgottenCopy,
    planted.MissedRelease,
    planted.NoCopyOnWrite,
    planted.NoSalt,
    planted.OffByOne,
    planted.StaleCount,
    planted.UnlockedTier,
)


def printed(fault: Fault, **exchanged: str) -> Callable[[], None]:
    """The printed test, run as if it had been pasted; `exchanged`: module of a name to import in place of a faulty one."""
    code = fault.test
    for name, source in exchanged.items():
        code = code.replace(f"from planted import {name}", f"from {source} as {name}")
    pasted: dict[str, Callable[[], None]] = {}
    exec(code, pasted)  # noqa: S102
    return pasted["test_found_by_the_fuzzer"]


def fails(fault: Fault) -> None:
    with pytest.raises(Exception, match=re.escape(fault.message.partition(": ")[2])):
        printed(fault)()


@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_faulty_block_manager_is_found_and_shown_by_a_short_test(blocks: type) -> None:
    everything = installed(package="turnout")
    fault = search(Space(everything.scheduler, everything.preemption, [blocks]), TRACES)
    assert fault is not None
    assert fault.test.count("\n    engine.") <= 8, fault.test
    fails(fault)
    printed(fault, **{blocks.__name__: "turnout.plugins.blocks import PagedBlocks"})()


def test_a_host_block_given_away_before_its_swap_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine, "Swapper", planted.EagerSwapper)
        fault = search(Space([Shuffle], [Swap], installed(package="turnout").blocks), TRACES)
        assert fault is not None
        fails(fault)
    printed(fault)()


def test_a_scheduler_under_which_nobody_comes_further_is_found() -> None:
    everything = installed(package="turnout")
    fault = search(Space([planted.TakesTurns], everything.preemption, everything.blocks), TRACES)
    assert fault is not None and "nobody came further" in fault.message
    fails(fault)
    printed(fault, TakesTurns="turnout.plugins.scheduler import FCFS")()
