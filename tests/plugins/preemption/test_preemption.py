"""Recompute, swap and auto: the contract, who makes room, and which way is cheaper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from virtual import LAW, ask, drive, timed_engine

from turnout.core import Draft, PreemptMode, Request, RequestView
from turnout.plugins import preemption as ours
from turnout.plugins.preemption import Auto, Recompute, Swap
from turnout.plugins.preemption.auto import REMEASURE
from turnout.plugins.preemption.victims import RULES
from turnout.plugins.scheduler import FCFS
from turnout.testing.policies import PreemptionContract, rules

CASES: dict[str, Callable[[], object]] = {
    "recompute": Recompute,
    "swap": Swap,
    "swap-nowhere": partial(Swap, host_blocks=0),
    "swap-little-room": partial(Swap, host_blocks=5),
    "auto": Auto,
    "auto-little-room": partial(Auto, host_blocks=5),
} | {f"recompute-{rule}": partial(Recompute, rule) for rule in RULES}


@pytest.mark.parametrize("name", CASES)
def test_it_keeps_every_rule(name: str) -> None:
    kept = [check() for _, check in rules(PreemptionContract, CASES[name])]
    assert len(kept) > 2


def test_every_policy_that_is_registered_is_among_them() -> None:
    registered: dict[str, type] = {}
    ours.register_preemptions(registered.__setitem__)
    assert registered.keys() == {name.partition("-")[0] for name in CASES}


class TestVictimRule:
    @pytest.mark.parametrize(
        ("rule", "victim"), [("newest", "d"), ("least_lost", "b"), ("most_blocks", "a"), ("lowest_priority", "c")]
    )
    @pytest.mark.parametrize("policy", [Recompute, Swap, Auto])
    def test_it_picks_by_what_its_name_says(self, policy: type, rule: str, victim: str) -> None:
        sizes, priorities = {"a": 30, "b": 3, "c": 9, "d": 12}, {"a": 0, "b": 1, "c": 7, "d": 2}
        running = [
            ask(name, n, 5, first=100 * i, priority=priorities[name], arrived=1 + i / 1000)
            for i, (name, n) in enumerate(sizes.items())
        ]
        assert self._victim(policy(victim_rule=rule), running) == victim

    @pytest.mark.parametrize("rule", RULES)
    def test_of_equals_the_newest_goes(self, rule: str) -> None:
        running = [ask(str(i), 8, 5, first=100 * i, arrived=1.0) for i in range(4)]
        assert self._victim(Recompute(rule), running) == "3"

    def test_an_unknown_rule_is_refused_with_the_known_ones(self) -> None:
        known = "newest, least_lost, most_blocks, lowest_priority"
        with pytest.raises(ValueError, match=f"preemption.victim_rule must be one of {known}, got 'oldest'"):
            Swap(victim_rule="oldest")

    def _victim(self, policy: Any, requests: Sequence[Request]) -> str:
        found: list[str] = []

        class Ask(FCFS):
            def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
                if len(running) == len(requests):
                    found.append(draft.victim(running).id)
                super().schedule(waiting, running, draft)

        engine, _ = timed_engine(Ask(), preemption=policy)
        drive(engine, requests)
        return found[0]


def modes(law: Sequence[float], policy: Auto, num_blocks: int = 40) -> tuple[list[tuple[PreemptMode, str]], Any]:
    """What `auto` chose and said for each victim, where steps follow `law`; and the counters."""
    seen: list[tuple[PreemptMode, str]] = []
    inner = policy.mode

    def mode(request: RequestView, draft: Draft) -> PreemptMode:
        chosen = inner(request, draft)
        seen.append((chosen, draft.reasons[request.id]))
        return chosen

    policy.mode = mode  # type: ignore[method-assign]
    engine, _ = timed_engine(FCFS(), law, num_blocks=num_blocks, max_num_batched_tokens=512, preemption=policy)
    drive(engine, [ask(str(i), 30 + i % 7, 60, first=37 * i) for i in range(30)])
    return seen, engine.stats


class TestAuto:
    def test_where_moving_is_cheap_every_victim_is_swapped(self) -> None:
        found, stats = modes((*LAW[:5], 1e-6), Auto(host_blocks=100))
        assert len(found) > 5 and {mode for mode, _ in found} == {PreemptMode.SWAP}
        assert stats.preemptions_recompute == 0

    def test_where_moving_is_dear_the_first_is_swapped_to_see_and_the_others_are_computed_again(self) -> None:
        found, stats = modes((*LAW[:5], 2e-2), Auto(host_blocks=100))
        assert [mode for mode, _ in found] == [PreemptMode.SWAP] + [PreemptMode.RECOMPUTE] * (len(found) - 1)
        assert len(found) > 5 and "to measure it" in found[0][1]
        assert stats.preemptions_swap == 1

    def test_it_gives_both_figures_as_measured(self) -> None:
        found, _ = modes((*LAW[:5], 2e-2), Auto(host_blocks=100))
        reason = found[-1][1]
        blocks, tokens = (int(reason.split(word)[1].split()[0]) for word in ("moving ", "computing "))
        moving, computing = (float(reason.split(word)[1].split()[0]) for word in ("expected to take ", "again "))
        assert moving == pytest.approx(2 * blocks * 2e-2 * 1e3, rel=0.1)
        assert computing == pytest.approx((LAW[1] * tokens + LAW[2] * tokens * tokens / 2) * 1e3, rel=0.1)
        assert "to be computed again: moving" in reason

    def test_who_finds_no_room_in_host_memory_is_computed_again_and_nothing_counts_as_a_fallback(self) -> None:
        found, stats = modes((*LAW[:5], 1e-6), Auto(host_blocks=3))
        assert {mode for mode, _ in found} == {PreemptMode.RECOMPUTE} and stats.swap_fallbacks == 0
        assert all("host memory has 3 blocks free, it holds" in reason for _, reason in found)

    def test_a_device_whose_link_got_faster_is_noticed(self) -> None:
        policy = Auto(host_blocks=100)
        engine, _ = timed_engine(FCFS(), (*LAW[:5], 2e-2), num_blocks=40, max_num_batched_tokens=512, preemption=policy)
        drive(engine, [ask(f"a{i}", 30, 60, first=37 * i) for i in range(12)])
        assert engine.stats.preemptions_swap == 1 < engine.stats.preemptions_recompute
        engine._runner.law = (*LAW[:5], 1e-6)  # type: ignore[attr-defined]
        drive(engine, [ask(f"b{i}", 5, 150, first=37 * i) for i in range(REMEASURE // 150 + 1)])
        engine.stats.preemptions_recompute = engine.stats.preemptions_swap = 0
        drive(engine, [ask(f"c{i}", 30, 60, first=37 * i) for i in range(30)])
        assert engine.stats.preemptions_swap > engine.stats.preemptions_recompute

    def test_negative_host_memory_is_refused(self) -> None:
        with pytest.raises(ValueError, match="preemption.host_blocks must not be negative, got -1"):
            Auto(host_blocks=-1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", [Recompute, Swap, Auto])
def test_wasted_tokens_are_counted(policy: type, rule: str) -> None:
    engine, _ = timed_engine(FCFS(), num_blocks=20, preemption=policy(victim_rule=rule))
    drive(engine, [ask(str(i), 20, 20, first=37 * i) for i in range(8)])
    stats = engine.stats
    assert (stats.recomputed_tokens > 0) is (stats.preemptions_recompute > 0)
    assert stats.preemptions_recompute + stats.preemptions_swap > 0
