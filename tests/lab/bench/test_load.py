"""Which request is sent when, and what its prompt is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from turnout.core.types import Request
from turnout.lab.bench.load import First, OfferedLoad, PlannedRequest
from turnout.lab.bench.prompts import PromptModel, Prompts
from turnout.lab.simulate.config import WORKLOADS
from turnout.lab.workload.arrivals import Arrival, prompt, sampling

MODEL = PromptModel(vocab_size=1000, max_model_len=400)


def at(*times: float) -> Iterator[Arrival]:
    for number, time in enumerate(times):
        yield Arrival(Request(f"r{number}", prompt(number, 5), sampling(3), time))


def ids(found: list[PlannedRequest]) -> list[tuple[str, float]]:
    return [(planned.request.id, planned.at) for planned in found]


def test_an_open_loop_asks_at_its_times_whether_or_not_anything_was_answered() -> None:
    load = OfferedLoad(at(0.0, 1.0, 1.5, 9.0))
    assert ids(load.due(0.0)) == [("r0", 0.0)]
    assert load.next_at == 1.0
    assert ids(load.due(5.0)) == [("r1", 1.0), ("r2", 1.5)]  # late as the caller is, they count from their times
    load.answered("r0", 6.0)
    assert ids(load.due(9.0)) == [("r3", 9.0)]
    assert load.next_at == math.inf


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    load = OfferedLoad(at(0.0, 100.0, 200.0, 300.0), clients=2)
    assert ids(load.due(0.0)) == [("r0", 0.0), ("r1", 0.0)]
    assert load.next_at == math.inf
    load.answered("r1", 2.5)
    assert ids(load.due(2.5)) == [("r2", 2.5)]
    load.answered("r2", 3.0)
    load.answered("r0", 3.5)
    assert ids(load.due(4.0)) == [("r3", 3.0)]  # the client of r0 finds nothing more to ask
    assert load.next_at == math.inf


def test_nothing_is_sent_after_the_limit_and_it_is_known() -> None:
    load = OfferedLoad(at(0.0, 1.0, 7.0), limit=5.0)
    assert len(load.due(10.0)) == 2
    assert (load.next_at, load.cut) == (math.inf, True)
    load = OfferedLoad(at(0.0, 1.0), clients=1, limit=5.0)
    load.due(0.0)
    load.answered("r0", 5.1)
    assert (load.next_at, load.cut) == (math.inf, True)


def test_the_next_turn_of_a_session_comes_when_the_last_one_was_answered_and_goes_on_from_it() -> None:
    workload = WORKLOADS["agents"](num_requests=20, turns=5, prefix=20, prompt=10, output=4, tool=6, seed=3)
    load = OfferedLoad(workload.arrivals(1.0, 1))
    first = load.due(load.next_at)[0]
    waiting = load.next_at
    assert load.answered(first.request.id, 1000.0) is True  # others wait, but not for this
    turns = [planned for planned in load.due(5000.0) if planned.before is not None]
    assert waiting < 1000.0 < turns[0].at
    prompts = Prompts(PromptModel(1000, 4000), run=1)
    before = prompts.of(first)
    said = [7] * first.request.sampling.max_tokens
    after = prompts.of(turns[0], said)
    assert after[: len(before) + len(said)] == before + said
    assert len(after) == len(turns[0].request.tokens)


def test_every_workload_can_be_put_on_an_engine() -> None:
    for name, kind in WORKLOADS.items():
        if name == "trace":
            continue
        load, prompts = OfferedLoad(kind(num_requests=8).arrivals(1.0, 2)), Prompts(MODEL, 1)
        sent = 0
        while load.next_at < math.inf and sent < 200:
            now = load.next_at
            for planned in load.due(now):
                tokens = prompts.of(planned._replace(request=cut(planned.request)))
                assert 1 <= len(tokens) <= 390
                assert 0 <= min(tokens) <= max(tokens) < 1000
                sent += 1
                load.answered(planned.request.id, now + 1.0)
        assert sent >= 8


def cut(request: Request) -> Request:
    return Request(request.id, request.tokens, sampling(10), request.arrived)


def test_interference_sends_a_document_now_and_then_until_the_streams_have_asked_enough() -> None:
    workload = WORKLOADS["interference"](num_requests=6, streams=2, every=5.0, document=50)
    load = OfferedLoad(workload.arrivals(1.0, 99))
    assert [name for name, _ in ids(load.due(0.0))] == ["r1", "r2"]
    load.answered("r1", 3.0)
    assert ids(load.due(6.0)) == [("r3", 3.0), ("d1", 5.0)]
    for name, now in (("r2", 7.0), ("r3", 8.0), ("d1", 9.0)):
        load.answered(name, now)
    assert ids(load.due(9.0)) == [("r4", 7.0), ("r5", 8.0)]
    load.answered("r4", 9.5)
    assert [name for name, _ in ids(load.due(30.0))] == ["r6", "d2"]
    assert load.next_at == math.inf
    with pytest.raises(ValueError, match=r"workload.rate does not go with workload=interference"):
        WORKLOADS["interference"](rate=3.0)


def test_to_warm_up_only_the_first_requests_come_and_nothing_follows() -> None:
    arrivals = list(First(WORKLOADS["chat"](), 3).arrivals(1.0, 8))
    assert [(a.request.id, a.then) for a in arrivals] == [("r0", None), ("r1", None), ("r2", None)]


def planned(tokens: list[int], name: str = "r", num: int = 10) -> PlannedRequest:
    return PlannedRequest(0.0, Request(name, tokens, sampling(num)), None, None)


def test_prompts_share_what_the_workload_shares_and_nothing_else() -> None:
    prompts = Prompts(MODEL, run=1)
    one = prompts.of(planned(prompt(1, 100) + prompt(2, 50)))
    two = prompts.of(planned(prompt(1, 100) + prompt(3, 50)))
    other = prompts.of(planned(prompt(4, 150)))
    assert one[:100] == two[:100]
    assert sum(a == b for a, b in zip(one[100:], two[100:], strict=True)) < 5
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 5
    assert len(set(one)) > 100
    assert min(one + two + other) >= 3


def test_another_run_has_other_tokens_of_the_same_lengths() -> None:
    one, two = (Prompts(MODEL, run).of(planned(prompt(1, 100))) for run in (1, 2))
    assert len(one) == len(two)
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 5
    assert one == Prompts(MODEL, 1).of(planned(prompt(1, 100)))


def test_what_the_context_has_no_room_for_is_cut_off_and_counted() -> None:
    prompts = Prompts(MODEL, 1)
    assert len(prompts.of(planned(prompt(1, 1000), num=100))) == 300
    assert prompts.num_cut == 1
    with pytest.raises(ValueError, match="leaves no room for a prompt in a context of 400: lower workload.output"):
        prompts.of(planned(prompt(1, 10), num=400))


def test_recorded_prompts_are_what_they_were_if_the_model_has_their_tokens() -> None:
    recorded = PlannedRequest(0.0, Request("r", [5, 999, 0, 7], sampling(2)), [1, 2], None)
    assert Prompts(MODEL, 1).of(recorded) == [5, 999, 0, 7]
    with pytest.raises(ValueError, match="recorded with token id 999; this model's ids end at 499"):
        Prompts(PromptModel(500, 100), 1).of(recorded)
