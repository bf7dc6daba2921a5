"""The first signal asks, a second one forces; tools that send one signal twice mean one."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from turnout.server.cli import stopping
from turnout.server.cli.stopping import SAME_SIGNAL, Stopping


class NoTimer:
    """Instead of a timer that would end the tests."""

    def __init__(self, seconds: float, function: object) -> None:
        self.seconds, self.daemon = seconds, False
        timers.append(self)

    def start(self) -> None:
        self.running = True

    def cancel(self) -> None:
        self.running = False


timers: list[NoTimer] = []


@pytest.fixture(autouse=True)
def _no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    timers.clear()
    monkeypatch.setattr(stopping.threading, "Timer", NoTimer)


def test_one_signal_asks_and_kills_nothing() -> None:
    kills: list[None] = []
    before = signal.getsignal(signal.SIGTERM)

    async def scenario(taken: Stopping) -> None:
        asked = taken.asked()
        await asyncio.sleep(0)
        assert not asked.done()
        signal.raise_signal(signal.SIGTERM)
        assert await asyncio.wait_for(asked, 1)

    with Stopping(lambda: kills.append(None)) as taken:
        asyncio.run(scenario(taken))
    assert (taken.code, kills, timers) == (0, [], [])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_before_the_loop_runs_is_not_lost() -> None:
    async def scenario(taken: Stopping) -> None:
        assert await asyncio.wait_for(taken.asked(), 1)

    with Stopping(lambda: None) as taken:
        signal.raise_signal(signal.SIGINT)
        asyncio.run(scenario(taken))


def test_a_second_signal_kills_and_bounds_the_rest() -> None:
    kills: list[None] = []
    with Stopping(lambda: kills.append(None)) as taken:
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.5 * SAME_SIGNAL)
        signal.raise_signal(signal.SIGTERM)
        taken.bound(1000.0, 1)
    assert (taken.code, len(kills)) == (143, 1)
    assert [timer.seconds for timer in timers] == [stopping.FORCED_TIMEOUT], (
        "a later deadline does not replace a sooner one"
    )
    assert timers[0].running, "it holds for what is left of the process"


def test_one_signal_sent_to_the_process_and_to_its_group_is_one() -> None:
    kills: list[None] = []
    with Stopping(lambda: kills.append(None)) as taken:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert (taken.code, kills) == (0, [])


def test_the_deadline_of_a_clean_end_goes_with_it() -> None:
    with Stopping(lambda: None) as taken:
        taken.bound(10.0, 1)
        assert timers[0].running
    assert not timers[0].running


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def elsewhere() -> None:
        with Stopping(lambda: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]
