"""Requests drawn from a seed."""

from __future__ import annotations

import itertools

import pytest
from simulations import shapes, simulation

from turnout.lab.simulate.config import WORKLOADS
from turnout.lab.workload import synthetic
from turnout.lab.workload.agents import Agents
from turnout.lab.workload.arrivals import Arrival, prompt
from turnout.lab.workload.trace import TraceFile
from turnout.plugins.blocks import PagedBlocks

SYNTHETIC = sorted(set(WORKLOADS) - {"trace"})


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_same_seed_makes_the_same_requests_in_order_of_time(name: str) -> None:
    def made(seed: int) -> list[tuple[float, int, int]]:
        kind = WORKLOADS[name](num_requests=50, seed=seed)
        return shapes([a.request for a in itertools.islice(kind.arrivals(1.0, 50), 50)])

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert [at for at, *_ in made(1)] == sorted(at for at, *_ in made(1))


@pytest.mark.parametrize("name", sorted(set(SYNTHETIC) - {"agents", "interference"}))
def test_a_factor_makes_the_same_requests_come_faster(name: str) -> None:
    kind = WORKLOADS[name](num_requests=200, rate=7.0)
    once, thrice = ([a.request for a in kind.arrivals(factor, 1)] for factor in (1.0, 3.0))
    assert [r.tokens for r in once] == [r.tokens for r in thrice]
    assert [r.arrived for r in once] == pytest.approx([3.0 * r.arrived for r in thrice])
    assert (kind.asked(3.0, 200, 1.0), kind.notes()) == (21.0, [])


def test_a_chat_has_the_stated_means() -> None:
    found = [a.request for a in synthetic.Chat(20_000, rate=50.0).arrivals(1.0, 1)]
    assert sum(r.sampling.max_tokens for r in found) / 20_000 == pytest.approx(100, rel=0.02)
    assert sum(len(r.tokens) for r in found) / 20_000 == pytest.approx(200, rel=0.03)
    assert found[-1].arrived == pytest.approx(400.0, rel=0.03)


def test_bursts_have_the_stated_rate_and_spread() -> None:
    times = [a.request.arrived for a in synthetic.Bursts(20_000, rate=5.0, cv=2.0).arrivals(1.0, 1)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean == pytest.approx(2.0, rel=0.05)


def test_tenants_are_drawn_by_zipfs_law() -> None:
    labels = [a.request.labels["tenant"] for a in synthetic.Chat(6000, rate=1.0, tenants=3).arrivals(1.0, 1)]
    assert [labels.count(f"t{i}") / 6000 for i in range(3)] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)


def test_without_a_rate_as_many_clients_as_seats_ask_whenever_they_are_answered() -> None:
    run = simulation(workload=synthetic.Chat(40, prompt=4, output=30), blocks=PagedBlocks(4, 900))
    record = run.run()
    assert (record.num_finished, record.offered) == (40, None)
    assert record._most_running == 8  # the seats


def test_an_agents_turn_begins_with_all_that_was_said_before_it() -> None:
    kind = Agents(30, rate=10.0, prefix=50, tool=20, output=10, seed=3)
    first = next(a for a in kind.arrivals(1.0, 1) if a.then is not None)
    assert first.then is not None
    second = first.then(100.0)
    assert second is not None
    said = first.request.sampling.max_tokens
    assert second.request.tokens[: len(first.request.tokens) + said] == first.request.tokens + [0] * said
    assert len(second.request.tokens) > len(first.request.tokens) + said
    assert second.request.arrived > 100.0


def test_agents_ask_as_often_as_they_were_told_to() -> None:
    kind, turns = Agents(200, rate=10.0, prefix=10, tool=5, output=5), 0
    for one in kind.arrivals(1.0, 1):
        following: Arrival | None = one
        while following is not None:
            turns += 1
            following = following.then(0.0) if following.then is not None else None
    assert turns == 200


def test_shared_prefixes_are_shared() -> None:
    found = [a.request for a in synthetic.SharedPrefix(100, prefixes=3, prefix=20).arrivals(1.0, 1)]
    assert len({tuple(r.tokens[:20]) for r in found}) == 3
    assert len({tuple(r.tokens[:21]) for r in found}) == 100


def test_a_prompt_shares_its_first_token_with_no_other() -> None:
    assert prompt(3, 4) == [4, 0, 0, 0]
    assert prompt(4, 1) == [5]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (synthetic.Chat, {"num_requests": 0}, "workload.num_requests must be above 0, got 0"),
        (synthetic.Chat, {"rate": -1.0}, "workload.rate must be above 0, got -1.0"),
        (synthetic.Bursts, {"rate": None}, "workload.rate must be given"),
        (synthetic.Mixed, {"tenants": 2}, "workload.tenants must stay 1 for workload=mixed"),
        (TraceFile, {"speed": 0.0}, "workload.speed must be above 0, got 0.0"),
    ],
)
def test_an_option_out_of_range_is_named(kind: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_a_trace_needs_a_path() -> None:
    with pytest.raises(ValueError, match="workload=FILE names the trace"):
        list(TraceFile().arrivals(1.0, 1))
