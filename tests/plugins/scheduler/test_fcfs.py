"""First come, first served: order, and who makes room."""

from __future__ import annotations

from virtual import ask, drive, first_chunks, timed_engine

from turnout.plugins.scheduler import FCFS
from turnout.testing import make_engine


def test_requests_start_in_the_order_they_came_however_long_or_urgent() -> None:
    engine, _ = timed_engine(FCFS(), max_num_seqs=2)
    sizes = [30, 2, 50, 4, 1]
    drive(engine, [ask(str(i), n, 5, arrived=1 + i / 1e4, priority=-i) for i, n in enumerate(sizes)])
    assert first_chunks(engine) == list("01234")


def test_a_prompt_takes_all_the_budget_leaves() -> None:
    engine, _ = timed_engine(FCFS(), max_num_batched_tokens=20)
    drive(engine, [ask("a", 8, 2), ask("b", 30, 2)])
    sizes = [[chunk.num_tokens for chunk in step.chunks] for step in engine._runner.steps]  # type: ignore[attr-defined]
    assert sizes == [[8, 12], [1, 18], [1]]


def test_a_request_is_not_begun_before_the_cache_has_room_for_all_of_it() -> None:
    engine, _ = timed_engine(FCFS(), num_blocks=10, max_num_batched_tokens=20)
    long, short = ask("long", 35, 2, first=50), ask("short", 4, 2)
    drive(engine, [ask("runs", 12, 8), long, short])
    assert first_chunks(engine) == ["runs", "long", "short"]
    assert long.num_preemptions == 0


def test_out_of_blocks_the_one_admitted_first_goes_on() -> None:
    engine = make_engine(FCFS(), num_blocks=6)
    asked = [ask(name, 7, 17, first=100 * i) for i, name in enumerate("abc")]
    for request in asked:
        engine.add(request)
    ended = [output.request_id for _ in range(200) if engine.busy for output in engine.step() if output.finish]
    assert ended == list("abc") and asked[0].num_preemptions == 0 < asked[2].num_preemptions
