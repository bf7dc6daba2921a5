"""Ratios of speed: in turns, with what is uncertain about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from turnout.lab.compare.sides import EngineSide, Item, Speed
from turnout.lab.compare.speed import race


class Timed(EngineSide):
    """A side that takes a stated time, on a machine that gets slower and slower."""

    calls: ClassVar[list[str]] = []

    def __init__(self, name: str, slowness: float) -> None:
        self.name, self.slowness = name, slowness

    def race(self, items: Sequence[Item], max_tokens: int) -> Speed:
        drift = 1.1 ** len(Timed.calls)
        Timed.calls.append(self.name)
        noise = 1 + 0.02 * np.random.default_rng(len(Timed.calls)).normal()
        time = self.slowness * drift * noise
        return Speed(time, 100, [time / 10] * 3, [time / 100] * 97)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Timed.calls = []


def test_the_sides_run_in_turns_after_a_warm_up_and_drift_cancels() -> None:
    [found] = race(Timed("a", 1.0), [Timed("b", 2.0)], [], 8, rounds=6)
    assert "".join(Timed.calls) == "ba" + "abba" * 3
    ratio = found.ratios()["ITL p50"]
    assert ratio.low < 2.0 < ratio.high and ratio.high / ratio.low < 1.5
    assert found.ratios()["output tokens/s"].mean == pytest.approx(1 / ratio.mean)


def test_two_sides_alike_have_a_ratio_of_one_within_its_interval() -> None:
    [found] = race(Timed("a", 1.0), [Timed("b", 1.0)], [], 8, rounds=6)
    assert all(ratio.low < 1.0 < ratio.high for ratio in found.ratios().values())


def test_one_round_says_nothing_and_none_times_nothing() -> None:
    assert race(Timed("a", 1.0), [Timed("b", 1.0)], [], 8, rounds=1)[0].ratios() == {}
    Timed.calls = []
    assert race(Timed("a", 1.0), [Timed("b", 1.0)], [], 8, rounds=0)[0].rounds == [] and not Timed.calls
