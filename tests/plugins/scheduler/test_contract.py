"""Every scheduler that ships keeps the contract, with its defaults and at the edges of its options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from turnout.plugins import scheduler as ours
from turnout.testing.policies import SchedulerContract, rules

CASES: dict[str, Callable[[], object]] = {
    "fcfs": ours.FCFS,
    "chunked_prefill": ours.ChunkedPrefill,
    "chunked_prefill-single-tokens": partial(ours.ChunkedPrefill, chunk=1, max_prefill_tokens=1),
    "chunked_prefill-target": partial(ours.ChunkedPrefill, target_itl=0.01),
    "chunked_prefill-long": partial(ours.ChunkedPrefill, chunk=5, long_prefill_token_threshold=6),
    "priority": ours.Priority,
    "priority-no-levels": partial(ours.Priority, ageing=0.0, chunk=1),
    "fair": ours.Fair,
    "fair-outputs-only": partial(ours.Fair, input_weight=0.0, chunk=3),
    "deadline": ours.Deadline,
    "deadline-hopeless": partial(ours.Deadline, ttft_target=1e-6, itl_target=1e-6),
    "prefix_aware": ours.PrefixAware,
    "prefix_aware-window-of-one": partial(ours.PrefixAware, window=1, chunk=2),
}


@pytest.mark.parametrize("name", CASES)
def test_it_keeps_every_rule(name: str) -> None:
    kept = [check() for _, check in rules(SchedulerContract, CASES[name])]
    assert len(kept) > 5


def test_every_scheduler_that_is_registered_is_among_them() -> None:
    registered: dict[str, type] = {}
    ours.register_schedulers(registered.__setitem__)
    assert registered.keys() == {name.partition("-")[0] for name in CASES}
    assert all(CASES[name] is component for name, component in registered.items())
