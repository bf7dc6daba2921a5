"""Fair: tenants that have work waiting get the same service, and being away saves nothing up."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from virtual import ask, drive, first_chunks, timed_engine

from turnout.core import Request
from turnout.core.engine import Engine
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler import Fair


def services(requests: list[Request], weight_in: float = 1.0, weight_out: float = 2.0) -> dict[str, float]:
    """By tenant, what was delivered so far."""
    total: Counter[str] = Counter()
    for request in requests:
        started = request.scheduled_at is not None
        total[request.labels["tenant"]] += weight_in * request.num_prompt * started + weight_out * request.num_generated  # type: ignore[assignment]
    return dict(total)


def backlog(dice: random.Random, tenant: str, num: int, longest: int, most: int) -> list[Request]:
    return [
        ask(f"{tenant}{i}", dice.randint(1, longest), dice.randint(1, most), first=dice.randrange(900), tenant=tenant)
        for i in range(num)
    ]


class TestBound:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("weights", [(1.0, 2.0), (1.0, 1.0), (3.0, 0.5)], ids=str)
    def test_two_tenants_with_work_waiting_never_differ_by_more_than_the_paper_says(
        self, seed: int, weights: tuple[float, float]
    ) -> None:
        dice = random.Random(seed)
        small = backlog(dice, "small", 120, 4, 4)
        large = backlog(dice, "large", 40, 30, 20)
        asked = [*large, *small]
        engine, _ = timed_engine(Fair(input_weight=weights[0], output_weight=weights[1]), num_blocks=40)
        bound = 2 * max(weights[0] * 30, weights[1] * engine.info.capacity)
        for request in asked:
            engine.add(request)
        most = 0.0
        before: dict[str, float] = {"small": 0.0, "large": 0.0}
        while len({request.labels["tenant"] for request in engine.waiting}) == 2:
            engine.step()
            now = services(asked, *weights)
            most = max(most, abs(now["small"] - now["large"]))
            before = now
        assert most <= bound
        assert min(before.values()) > 2 * most  # the phase was long enough to tell

    def test_a_burst_of_one_tenant_does_not_delay_another(self) -> None:
        engine, _ = timed_engine(Fair(), max_num_seqs=2)
        burst = [ask(f"a{i}", 10, 10, first=7 * i, tenant="a") for i in range(30)]
        drive(
            engine, [*burst, *(ask(f"b{i}", 10, 10, first=500, arrived=1.02 + i / 1e4, tenant="b") for i in range(3))]
        )
        assert max(first_chunks(engine).index(f"b{i}") for i in range(3)) < 10

    def test_a_prompt_that_several_answers_share_is_charged_once(self) -> None:
        engine, _ = timed_engine(scheduler := Fair(), num_blocks=40)
        asked = [ask(f"a{i}", 20, 4, first=3, tenant="a") for i in range(4)]
        for request in asked[1:]:
            request.parent = "a0"
        drive(engine, asked)
        assert scheduler._served["a"] == 20 + 2 * 4 * 4

    @pytest.mark.parametrize("preemption", [Recompute("most_blocks"), Swap(20)], ids=["recompute", "swap"])
    def test_what_preemption_costs_is_not_charged_to_its_victim(self, preemption: Recompute | Swap) -> None:
        dice = random.Random(1)
        asked = backlog(dice, "a", 40, 20, 30) + backlog(dice, "b", 40, 20, 30)
        engine, _ = timed_engine(scheduler := Fair(), num_blocks=20, preemption=preemption)
        for request in asked:
            engine.add(request)
        while len({request.labels["tenant"] for request in engine.waiting}) == 2:
            engine.step()
        assert sum(request.num_preemptions for request in asked) > 0
        delivered = services(asked)
        assert {t: scheduler._served[t] - delivered[t] for t in "ab"} == {"a": 0.0, "b": 0.0}
        assert abs(delivered["a"] - delivered["b"]) <= 2 * 2 * engine.info.capacity


class TestCounters:
    def test_within_a_tenant_it_is_first_come_first_served_and_tenants_take_turns(self) -> None:
        engine, _ = timed_engine(Fair(), max_num_seqs=1)
        asked = [ask(f"a{i}", 5, 5, tenant="a") for i in range(3)] + [ask(f"b{i}", 5, 5, tenant="b") for i in range(3)]
        drive(engine, asked)
        assert first_chunks(engine) == ["a0", "b0", "a1", "b1", "a2", "b2"]

    def test_a_tenant_that_was_away_gets_no_more_than_its_share_afterwards(self) -> None:
        engine, _ = timed_engine(Fair(), max_num_seqs=1)
        busy = [ask(f"a{i}", 5, 20, first=i, tenant="a") for i in range(40)]
        back = [ask(f"b{i}", 5, 20, first=500 + i, arrived=2.0, tenant="b") for i in range(20)]
        drive(engine, [*busy, *back])
        order = first_chunks(engine)
        since = order[order.index("b0") :][:20]
        assert sum(name.startswith("b") for name in since) == 10

    def test_requests_without_the_label_are_one_tenant(self) -> None:
        engine, _ = timed_engine(Fair(), max_num_seqs=1)
        drive(engine, [ask(f"none{i}", 5, 5) for i in range(3)] + [ask("b", 5, 5, tenant="b")])
        assert first_chunks(engine) == ["none0", "b", "none1", "none2"]

    def test_the_label_can_be_named(self) -> None:
        engine, _ = timed_engine(Fair(tenant_label="user"), max_num_seqs=1)
        drive(
            engine,
            [ask(f"a{i}", 5, 5, user="a", tenant="same") for i in range(2)] + [ask("b", 5, 5, user="b", tenant="same")],
        )
        assert first_chunks(engine) == ["a0", "b", "a1"]

    def test_out_of_blocks_the_tenant_served_most_makes_room(self) -> None:
        engine, _ = timed_engine(Fair(), num_blocks=12)
        rich = [ask(f"a{i}", 8, 20, first=100 * i, tenant="a") for i in range(2)]
        poor = ask("b", 4, 12, first=500, tenant="b")
        for request in (*rich, poor):
            engine.add(request)
        engine.step()
        while not engine.waiting:
            engine.step()
        assert [r.id for r in engine.waiting] == ["a1"]

    def test_tenants_that_are_gone_are_forgotten(self) -> None:
        engine, _ = timed_engine(scheduler := Fair())
        asked = [ask(str(i), 5, 5, arrived=1 + i / 100, tenant=f"tenant-{i}") for i in range(300)]
        sizes: list[int] = []

        def watch() -> None:
            sizes.append(len(scheduler._served))

        drive(engine, asked, watch)
        assert max(sizes) < 30

    @pytest.mark.parametrize("options", [{"input_weight": -1.0}, {"output_weight": -0.1}, {"chunk": 0}])
    def test_impossible_options_are_refused(self, options: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=f"scheduler.{next(iter(options))} must"):
            Fair(**options)  # type: ignore[arg-type]


def test_an_engine_that_changes_its_scheduler_on_the_way_goes_on() -> None:
    from turnout.plugins.scheduler import FCFS

    engine: Engine
    engine, _ = timed_engine(FCFS(), num_blocks=12)
    for i in range(4):
        engine.add(ask(str(i), 8, 20, first=100 * i, tenant=str(i)))
    engine.step()
    engine._scheduler = Fair()
    drive(engine, [])
    assert engine.stats.finished == {"length": 4}
