"""A plugin that listens and raises costs a line in the log and a count, whichever hook it is in."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fickle import alone, requests

from turnout.core import ContractError, Request, StepReport, hookimpl
from turnout.core.hooks import new_hooks
from turnout.plugins.scheduler import FCFS
from turnout.testing import check_balance, make_engine, serve_all

HOOKS = ("request_added", "step_finished", "request_finished", "request_dropped")


class Broken:
    """Raises in one hook."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise ValueError("the quota service is down")

    @hookimpl
    def request_added(self, request: Request) -> None:
        self._maybe("request_added")

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self._maybe("step_finished")

    @hookimpl
    def request_finished(self, request: Request) -> None:
        self._maybe("request_finished")

    @hookimpl
    def request_dropped(self, request: Request) -> None:
        self._maybe("request_dropped")


class Counts:
    """Hears everything."""

    def __init__(self) -> None:
        self.heard = dict.fromkeys(HOOKS, 0)

    @hookimpl
    def request_added(self, request: Request) -> None:
        self.heard["request_added"] += 1

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self.heard["step_finished"] += 1

    @hookimpl
    def request_finished(self, request: Request) -> None:
        self.heard["request_finished"] += 1

    @hookimpl
    def request_dropped(self, request: Request) -> None:
        self.heard["request_dropped"] += 1


@pytest.mark.parametrize("where", HOOKS)
def test_requests_and_the_other_plugins_notice_nothing(where: str, caplog: pytest.LogCaptureFixture) -> None:
    hooks, before, after = new_hooks(), Counts(), Counts()
    for name, plugin in (("before", before), ("faulty", Broken(where)), ("after", after)):
        hooks.register(plugin, name)
    engine, asked = make_engine(FCFS(), num_blocks=60, hooks=hooks), requests(1)
    for request in asked:
        request.keep = True
    with caplog.at_level(logging.ERROR):
        assert serve_all(engine, asked) == alone(asked)
        for request in asked:
            engine.drop(request.id)
    check_balance(engine)
    assert before.heard == after.heard and after.heard["request_added"] == len(asked)
    assert engine.stats.observer_failures == after.heard[where] > 1
    (line,) = caplog.records
    assert f"the plugin faulty failed in its hook {where}" in line.getMessage()


def test_a_hook_that_wraps_the_others_is_refused_by_name() -> None:
    class Wraps:
        @hookimpl(wrapper=True)
        def step_finished(self, report: StepReport) -> Any:
            return (yield)

    hooks = new_hooks()
    hooks.register(Wraps(), "curious")
    with pytest.raises(ContractError, match="the plugin curious wraps the hook step_finished"):
        make_engine(FCFS(), hooks=hooks)
