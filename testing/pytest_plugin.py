"""Tests over every choice that is installed: an argument named `each_SLOT` makes a test run once for each of them.

    # conftest.py, or the test module itself
    from turnout.testing.pytest_plugin import pytest_generate_tests

    def test_every_scheduler_says_the_same(each_scheduler):
        assert_equivalent([MODEL], [MODEL, each_scheduler], workload="short")

The value is an override such as "scheduler=fcfs". A choice that can't run on this machine is skipped with its reason. It is no
entry point of pytest: an environment that has turnout would import torch for every test of anything.
"""

from __future__ import annotations

import pytest

from turnout.compose import plugins
from turnout.compose.plugins import SLOTS, Choice
from turnout.core.interfaces import Auto


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Called by pytest for every test function."""
    for slot in SLOTS:
        if f"each_{slot}" in metafunc.fixturenames:
            metafunc.parametrize(f"each_{slot}", choices(slot))


def choices(slot: str) -> list[object]:
    """Parameters for every installed choice of a slot, less `auto` of attention, which stands for another one."""
    found = [c for c in plugins.load().choices.values() if c.slot == slot and c.component is not Auto]
    return [_parameter(choice) for choice in sorted(found, key=lambda choice: choice.name)]


def _parameter(choice: Choice) -> object:
    why = [*choice.obstacles(), *_not_here(choice)]
    marks = [pytest.mark.skip(reason=f"{choice.slot}={choice.name}: {'; '.join(why)}")] if why else []
    return pytest.param(f"{choice.slot}={choice.name}", id=choice.name, marks=marks)


def _not_here(choice: Choice) -> list[str]:
    """Why an attention backend has no device here."""
    import torch

    devices = choice.devices
    here = {"cpu", *(["cuda"] if torch.cuda.is_available() else [])}
    return [] if devices is None or devices & here else [f"it runs on {', '.join(sorted(devices))}"]
