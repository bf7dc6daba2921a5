"""One simulation: what passes on the virtual clock, counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from grids import in_turn
from simulations import Listed, arrival, simulation

from turnout.compose.config import Limits
from turnout.core import Draft, Request, RequestView
from turnout.core.types import ContractError
from turnout.lab.simulate.config import Target
from turnout.lab.simulate.latency import Constant
from turnout.lab.workload.agents import Agents
from turnout.lab.workload.arrivals import Arrival, sampling
from turnout.lab.workload.synthetic import Mixed, Poisson
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.preemption import Auto, Recompute, Swap
from turnout.plugins.scheduler import FCFS, ChunkedPrefill, Deadline, Fair, PrefixAware, Priority
from turnout.testing import check_balance

SCHEDULERS = (FCFS, ChunkedPrefill, Priority, Fair, Deadline, PrefixAware)
PREEMPTIONS = (Recompute, Swap, Auto)


def test_a_request_that_arrives_during_a_step_joins_the_next_one() -> None:
    run = simulation(arrival(0.0, 4, 2), arrival(0.5, 4, 1))
    record = run.run()
    # second 0-1: the first prompt; 1-2: its second token, and the prompt that arrived at 0.5
    assert [record.ttft.quantile(q) for q in (0.5, 1.0)] == [1.0, 1.5]
    assert [record.e2e.quantile(q) for q in (0.5, 1.0)] == [1.5, 2.0]
    assert (record.itl.count, record.itl.mean, record.seconds, record.stats.num_steps) == (1, 1.0, 2.0, 2)
    assert [record.queue.quantile(q) for q in (0.5, 1.0)] == [0.0, 0.5]


def test_an_idle_engine_lets_the_clock_jump_to_the_next_arrival() -> None:
    record = simulation(arrival(10.0, 4, 1), arrival(1000.0, 4, 3)).run()
    assert (record.seconds, record.stats.num_steps) == (1003.0, 4)
    assert record.ttft.most == 1.0


def test_a_gap_between_tokens_counts_the_time_a_request_was_preempted() -> None:
    # 4 blocks of 4: both prompts fit, both answers do not; the newer gives way until the older has finished
    older, newer = arrival(0.0, 8, 9, "older"), arrival(0.0, 7, 4, "newer")
    record = simulation(older, newer, blocks=PagedBlocks(block_size=4, num_blocks=4, prefix_cache=False)).run()
    assert record.stats.preemptions_recompute == 1
    assert record.stats.recomputed_tokens == 7  # its prompt
    # the older one takes a third block in step 2 and is done after step 9; the newer one says tokens at 1, 10, 11, 12
    assert [record.itl.quantile(q) for q in (0.9, 1.0)] == [1.0, 9.0]
    assert (record.itl.count, record.seconds) == (8 + 3, 12.0)


def test_one_seat_is_the_queue_of_the_textbooks() -> None:
    """M/D/1: requests wait rho / (1 - rho) / 2 services on average (Pollaczek, Khinchin)."""
    for rho in (0.3, 0.7):
        workload = Poisson(num_requests=6000, rate=rho, prompt=1, output=1)
        record = simulation(workload=workload, limits=Limits(max_num_seqs=1), latency=Constant(1.0)).run()
        assert record.queue.mean == pytest.approx(rho / (1 - rho) / 2, rel=0.1)


def test_a_request_that_could_never_run_is_counted_as_refused_with_the_reason() -> None:
    record = simulation(arrival(0.0, 4, 1), arrival(1.0, 401, 1)).run()
    assert (record.num_added, record.num_finished, record.num_refused) == (1, 1, 1)
    assert "together 402, but the context length is 401" in record.first_refusal


def test_a_workload_that_is_refused_whole_is_an_error() -> None:
    with pytest.raises(ValueError, match="every request is refused: the prompt has 401 tokens"):
        simulation(arrival(1.0, 401, 1)).run()


def test_a_client_sends_its_next_request_when_the_last_one_has_finished() -> None:
    second = arrival(7.5, 4, 1, "second")
    first = arrival(0.0, 4, 3, "first")._replace(then=lambda now: second if now == 3.0 else None)
    record = simulation(first).run()
    assert (record.num_finished, record.seconds, record.ttft.most) == (2, 8.5, 1.0)


def test_goodput_counts_what_meets_both_targets_its_own_before_everybodys() -> None:
    # one seat, a second a step: tokens at 1, 2, 3; 4, 5; 6
    first, second, third = arrival(0.0, 4, 3, "a"), arrival(0.0, 4, 2, "b"), arrival(0.0, 4, 1, "c")
    third.request.labels = {"ttft_target": "6"}
    options: dict[str, Any] = {"limits": Limits(max_num_seqs=1), "target": Target(ttft=3.5, itl=1.0)}
    record = simulation(first, second, third, **options).run()
    assert (record.num_good, record.summary()["goodput"]["share"]) == (2, pytest.approx(2 / 3, abs=1e-6))
    options["target"] = Target(ttft=None, itl=0.9)
    first, second = arrival(0.0, 4, 3, "a"), arrival(0.0, 4, 1, "b")
    assert simulation(first, second, **options).run().num_good == 1  # a single token has no gaps


def test_recorded_answers_come_back_as_they_were() -> None:
    request = Request("r", [5, 6], sampling(3), 1.0)
    simulation(Arrival(request, (7, 8, 9))).run()
    assert request.tokens == [5, 6, 7, 8, 9]


class Patient:
    """Lets every request wait for half a second."""

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        for request in running:
            draft.take(request)
        for request in waiting:
            if draft.now - request.arrived >= 0.5:
                draft.take(request)


def test_time_passes_while_a_scheduler_waits_for_something() -> None:
    record = simulation(arrival(1.0, 4, 1), scheduler=Patient()).run()
    assert 1.5 <= record.ttft.most <= 1.502


class Refuses:
    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None: ...


def test_a_scheduler_that_runs_nothing_is_named() -> None:
    with pytest.raises(ContractError, match="it ran nothing"):
        simulation(arrival(1.0, 4, 1), scheduler=Refuses()).run()


@in_turn(scheduler=SCHEDULERS, preemption=PREEMPTIONS)
def test_every_request_says_its_tokens_and_every_block_comes_back(
    scheduler: Callable[[], Any], preemption: Callable[[], Any]
) -> None:
    workload = Mixed(num_requests=60, rate=200.0, prompt=30, output=20, document=100)
    run = simulation(
        workload=workload,
        scheduler=scheduler(),
        preemption=preemption(),
        blocks=PagedBlocks(block_size=4, num_blocks=260),
        latency=Constant(0.05),
    )
    asked = [a.request.sampling.max_tokens for a in workload.arrivals(1.0, 8) if len(a.request.tokens) < 1000]
    record = run.run()
    assert record.num_finished == 60
    assert record.stats.generated_tokens == sum(asked)
    assert record.ttft.count == 60
    assert record.itl.count == sum(asked) - 60
    check_balance(run.engine)
    assert not run._open
    assert not run.runner.answers


def test_the_same_seed_gives_the_same_numbers() -> None:
    def numbers() -> dict[str, Any]:
        run = simulation(
            workload=Agents(num_requests=40, rate=20.0, prefix=50, tool=20, output=10),
            blocks=PagedBlocks(block_size=4, num_blocks=700),
            latency=Constant(0.05),
            limits=Limits(max_num_seqs=4, max_num_batched_tokens=64),
        )
        summary = run.run().summary()
        del summary["wall"]
        return summary

    first = numbers()
    assert first == numbers()
    assert first["cache"]["hit_rate"] > 0.5


def test_requests_are_made_when_they_are_due_and_forgotten_when_they_have_finished() -> None:
    ahead: list[int] = []  # requests made and not finished, whenever one is made

    class Watched(Listed):
        def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
            for number in range(500):
                yield arrival(float(10 * number), 4, 1, f"r{number}")
                ahead.append(number + 1 - run.record.num_finished)

    run = simulation(workload=Watched())
    assert not ahead
    run.run()
    assert len(ahead) == 500
    assert max(ahead) == 1
    assert not run._open
    assert not run.record._said
