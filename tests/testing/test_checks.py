"""What the check says of a component, whatever it does."""

from __future__ import annotations

from typing import Any

import pytest

from turnout.plugins.blocks.paged import PagedBlocks
from turnout.plugins.scheduler import ChunkedPrefill
from turnout.testing import checks
from turnout.testing.checks import check_component


class NoReset(PagedBlocks):
    """Can be started once a process."""

    started = False

    def start(self, num_blocks: int) -> None:
        assert not NoReset.started
        NoReset.started = True
        super().start(num_blocks)


class Raising(PagedBlocks):
    def cached(self, request: Any) -> int:
        raise OSError("no such block")


class Losing(PagedBlocks):
    def release(self, request: Any) -> None:
        del request.blocks[:]


@pytest.mark.parametrize("kind", [NoReset, Raising, Losing])
def test_a_broken_block_manager_is_judged_and_every_verdict_says_something(kind: type) -> None:
    faults = [result.fault for result in check_component("blocks", kind) if result.fault]
    assert faults and all(": " in fault and not fault.endswith(("Error:", "Error")) for fault in faults), faults


def test_a_rule_that_says_nothing_is_quoted() -> None:
    def rule() -> None:
        raise AssertionError

    assert checks._checked("it holds", rule).fault == "AssertionError: it does not hold that raise AssertionError"


def test_options_reach_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(checks._RULES, "scheduler", lambda kind: iter([("made", lambda: seen.append(kind()))]))
    assert not [result for result in check_component("scheduler", ChunkedPrefill, {"chunk": 7}) if result.fault]
    assert seen == [ChunkedPrefill(chunk=7)]
