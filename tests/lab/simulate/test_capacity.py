"""The highest rate that keeps a bound, on a queue whose answer is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from simulations import Listed, simulation

from turnout.compose.config import Limits
from turnout.core.types import Request
from turnout.lab.simulate.capacity import BEHIND, describe, keeps, search
from turnout.lab.simulate.config import Capacity
from turnout.lab.simulate.latency import Constant
from turnout.lab.simulate.record import SimulationRecord
from turnout.lab.workload.arrivals import Arrival, prompt, sampling
from turnout.plugins.blocks import PagedBlocks

SERVICE = 0.1  # seconds of a request, one at a time
COUNT = 200
BOUND = 0.5
LIMIT = 1 / (
    SERVICE - (BOUND - SERVICE) / 197
)  # above 10 a second, number k waits k (SERVICE - 1 / rate); p99 is k = 197


class Even(Listed):
    """COUNT requests, evenly spaced, `factor` a second."""

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        for number in range(COUNT):
            yield Arrival(Request(f"r{number}", prompt(number, 1), sampling(1), number / factor))


def probe(
    rate: float,
    allowed: Mapping[str, int] | None = None,
    bound: float = BOUND,
    limits: Limits = Limits(max_num_seqs=1),  # noqa: B008  it is never written to
) -> SimulationRecord:
    one = simulation(
        workload=Even(),
        latency=Constant(SERVICE),
        blocks=PagedBlocks(4, 1000),
        limits=limits,
        capacity=Capacity(ttft_p99=bound),
        factor=rate,
        allowed=allowed,
    )
    return one.run()


def test_the_queue_behaves_as_reckoned() -> None:
    assert probe(9.0).ttft.most == pytest.approx(SERVICE)
    assert probe(LIMIT * 0.999).ttft.quantile(0.99) <= BOUND < probe(LIMIT * 1.001).ttft.quantile(0.99)


@pytest.mark.parametrize("start", [0.3, 10.1, 700.0])
def test_bisection_finds_the_limit_from_any_start(start: float) -> None:
    found = search(probe, probe(start), start, precision=0.02)
    assert found.rate is not None
    assert found.fails_at is not None
    assert found.rate <= LIMIT < found.fails_at <= found.rate * 1.02
    assert found.record.ttft.quantile(0.99) <= BOUND
    assert found.record.num_finished == COUNT


def test_what_keeps_a_bound_keeps_it_at_every_lower_rate_tried() -> None:
    found = search(probe, probe(700.0), 700.0, precision=0.001)
    kept = [rate for rate, keeps in found.probes if keeps]
    broke = [rate for rate, keeps in found.probes if not keeps]
    assert max(kept) < min(broke)


def test_a_probe_that_cannot_keep_the_bound_any_more_ends_early() -> None:
    record = probe(100.0, {"ttft": 2})
    assert not keeps(record)
    assert record.num_finished < 10


def test_a_bound_no_rate_keeps_is_said_to_be_one() -> None:
    found = search(lambda rate, allowed: probe(rate, allowed, 0.05), probe(5.0, bound=0.05), 5.0, 0.02)
    assert found.rate is None
    assert found.fails_at == 5.0 / 4096
    assert describe(found)["bounds_p99"] == {"ttft": 0.05}


def test_a_rate_that_the_engine_cannot_keep_up_with_is_too_high_whatever_the_bound() -> None:
    found = search(lambda rate, allowed: probe(rate, allowed, 50.0), probe(5.0, bound=50.0), 5.0, 0.02)
    assert found.rate is not None
    assert 10.0 <= found.rate <= 10.0 / (1.0 - BEHIND) + 0.1  # one in twenty waits at the end


def test_a_workload_that_fits_the_seats_whole_has_no_limit() -> None:
    seats = Limits(max_num_seqs=COUNT)
    found = search(lambda rate, allowed: probe(rate, allowed, limits=seats), probe(5.0, limits=seats), 5.0, 0.02)
    assert (found.rate, found.fails_at) == (5.0 * 4096, None)
