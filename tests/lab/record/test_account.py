"""Every second of a request is accounted for: what it waited for, and what it was part of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from days import accounts, composed, engine_of, live, record_day
from grids import in_turn

from turnout.compose import plugins
from turnout.core import Draft, Request, RequestView, Sampling
from turnout.core.engine import Engine
from turnout.core.hooks import new_hooks
from turnout.server.steplog.log import StepLog
from turnout.server.steplog.pieces import LEFT_OUT, NEXT_STEP, OTHERS, PARENT
from turnout.server.steplog.record import Recorder
from turnout.server.steplog.why import told, why


class Ticks:
    """A second passes whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def watched(scheduler: str = "fcfs", preemption: str = "recompute", **limits: int) -> tuple[Engine, StepLog]:
    """An engine with a step log; a step takes three looks at the clock: began, scheduled, ended."""
    hooks, clock = new_hooks(), Ticks()
    log = StepLog(clock=clock)
    hooks.register(log)
    engine, _ = engine_of(composed(scheduler=scheduler, preemption=preemption), hooks, **limits)
    engine._clock = clock
    return engine, log


def asking(name: str, num_prompt: int = 4, max_tokens: int = 3, **rest: object) -> Request:
    tokens = [sum(name.encode()) + i for i in range(num_prompt)]
    return Request(name, tokens, Sampling(0, max_tokens=max_tokens), **rest)  # type: ignore[arg-type]


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def story(log: StepLog, name: str) -> list[tuple[str, str, float]]:
    """(what, reason, seconds) of each piece."""
    (account,) = log.why(name)
    pieces = account["pieces"]
    assert isinstance(pieces, list)
    assert sum(p["seconds"] for p in pieces) == pytest.approx(account["seconds"]), "seconds are missing"
    return [(p["what"], p["reason"], p["seconds"]) for p in pieces]


def test_a_request_alone_waits_for_the_next_step_computes_its_prompt_and_decodes() -> None:
    engine, log = watched()
    engine.add(asking("a"))  # at 1
    run(engine)  # steps from 2 to 4, 5 to 7, 8 to 10
    assert story(log, "a") == [("queued", NEXT_STEP, 1), ("prefill", "", 2), ("decode", "", 6)]
    (account,) = log.why("a")
    assert (account["state"], account["seconds"], account["seconds_to_first_token"]) == ("length", 9, 3)
    assert (account["prompt_tokens"], account["generated_tokens"], account["preemptions"]) == (4, 3, 0)


def test_steps_and_the_time_between_them_are_told_apart() -> None:
    engine, log = watched()
    engine.add(asking("a"))
    run(engine)
    (account,) = log.why("a")
    *_, prefill, decode = account["pieces"]  # type: ignore[misc]
    assert (prefill["steps"], prefill["in_steps"]) == (1, 2)
    assert (decode["steps"], decode["in_steps"], decode["beside_prompts"]) == (2, 4, 0)


def test_decodes_beside_the_prompts_of_others_are_told() -> None:
    engine, log = watched()
    engine.add(asking("a", max_tokens=5))
    engine.step()
    engine.add(asking("b"))
    run(engine)
    (account,) = log.why("a")
    assert account["pieces"][-1]["beside_prompts"] == 2  # type: ignore[index]


def test_a_prompt_in_chunks_is_one_piece() -> None:
    engine, log = watched("chunked_prefill")
    engine.add(asking("a", 12))
    run(engine)
    (account,) = log.why("a")
    assert [(p["what"], p["steps"]) for p in account["pieces"]] == [("queued", 0), ("prefill", 3), ("decode", 2)]  # type: ignore[union-attr]


def test_who_waits_for_a_seat_is_told_so_and_who_stands_behind_it_waits_behind_others() -> None:
    engine, log = watched(max_num_seqs=1)
    for name in "abc":
        engine.add(asking(name))
    run(engine)
    assert [(what, reason) for what, reason, _ in story(log, "b")][:2] == [
        ("queued", NEXT_STEP),
        ("queued", "every seat is taken"),
    ]
    assert [(what, reason) for what, reason, _ in story(log, "c")][:3] == [
        ("queued", NEXT_STEP),
        ("queued", OTHERS),
        ("queued", "every seat is taken"),
    ]


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_a_preempted_request_says_how_and_computes_its_prompt_again_only_when_it_must(how: str) -> None:
    engine, log = watched(preemption=how, num_blocks=5)
    engine.add(asking("a", 7, 8))
    engine.add(asking("b", 7, 8))
    run(engine)
    whats = [what for what, _, _ in story(log, "b")]
    there = whats.index(f"preempted ({how})")
    assert whats[there - 1] == "decode"
    assert whats[there + 1] == {"recompute": "prefill", "swap": "decode"}[how]
    assert log.why("b")[0]["preemptions"] == 1


class Stingy:
    """Gives every other step to the oldest request alone."""

    def __init__(self) -> None:
        self.odd = False

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        self.odd = not self.odd
        for request in (*running, *waiting) if self.odd else running[:1]:
            draft.take(request)
        if not self.odd and len(running) > 2:
            draft.explain(running[2], "it is the third: and so on")


def test_a_running_request_that_has_no_part_in_a_step_is_left_out() -> None:
    engine, log = watched()
    engine._scheduler = Stingy()
    for name in "abc":
        engine.add(asking(name, max_tokens=2))
    run(engine)  # the second step decodes a alone
    assert story(log, "a")[2:] == [("decode", "", 3)]
    assert story(log, "b")[2:] == [("decode", "", 1), ("left out", LEFT_OUT, 3), ("decode", "", 2)]
    assert story(log, "c")[2:] == [("decode", "", 1), ("left out", "it is the third: and so on", 3), ("decode", "", 2)]


def test_a_fork_waits_for_its_parents_prompt() -> None:
    engine, log = watched("chunked_prefill")
    parent = asking("a", 12, 2, keep=True)
    engine.add(parent)
    engine.add(Request("child", [*parent.tokens, 7], Sampling(0, max_tokens=2), parent="a"))
    run(engine)
    assert story(log, "child")[0][:2] == ("queued", PARENT)


def test_an_aborted_request_is_accounted_for_up_to_the_abort() -> None:
    engine, log = watched()
    engine.add(asking("a", max_tokens=40))
    engine.step()
    engine.abort("a")
    (account,) = log.why("a")
    assert account["state"] == "abort"
    assert story(log, "a")[-1] == ("decode", "", 1)


def test_an_open_request_is_accounted_for_up_to_now() -> None:
    engine, log = watched(max_num_seqs=1)
    engine.add(asking("a", max_tokens=40))
    engine.add(asking("b"))
    engine.step()
    assert story(log, "a")[-1][0] == "decode" and story(log, "b")[-1][:2] == ("queued", "every seat is taken")
    assert log.why("a")[0]["generated_tokens"] == 1
    assert log.why("nobody") == []


def test_a_client_finds_its_requests_by_the_id_it_was_told() -> None:
    engine, log = watched()
    for place in range(2):
        engine.add(asking(f"x-{place}", labels={"request": "abc"}))
    run(engine)
    for name in ("abc", "cmpl-abc", "chatcmpl-abc"):
        assert [account["id"] for account in log.why(name)] == ["x-0", "x-1"]


def test_memory_is_bounded_in_requests_in_steps_and_in_pieces_without_losing_a_second() -> None:
    hooks = new_hooks()
    log = StepLog(num_steps=7, num_requests=3)
    log.account._most_pieces = 2
    hooks.register(log)
    engine, log._clock = engine_of(composed(), hooks)
    live(engine, seed=3)
    assert (len(log.steps), len(log.account.ended), len(log.account.open)) == (7, 3, 0)
    for record in log.account.ended.values():
        assert len({piece.what for piece in record.pieces}) <= len(record.pieces) <= 6
        story(log, record.id)


@in_turn(scheduler=plugins.load().names("scheduler"), preemption=plugins.load().names("preemption"))
def test_no_second_is_lost_and_a_recording_tells_the_same_story(
    tmp_path: Path, scheduler: str, preemption: str
) -> None:
    hooks, path = new_hooks(), tmp_path / "day.jsonl"
    recorder, log = Recorder(str(path), 2**30), StepLog()
    log.account._most_pieces = None
    hooks.register(recorder)
    hooks.register(log)
    engine, clock = engine_of(composed(scheduler=scheduler, preemption=preemption), hooks)
    recorder._clock = log._clock = clock
    recorder.begin(engine.info)
    live(engine, 5)
    recorder.close()
    recorded = accounts(path)
    for place in range(40):
        (before,) = log.why(f"r{place}")
        after = recorded[f"r{place}"]
        for account in (before, after):
            pieces = account["pieces"]
            assert isinstance(pieces, list)
            assert sum(p["seconds"] for p in pieces) == pytest.approx(account["seconds"])
            for piece, following in pairwise(pieces):
                assert piece["began"] + piece["seconds"] == pytest.approx(following["began"]), "a gap"
        assert before["state"] == after["state"]
        assert before == after or before["state"] == "abort"  # of an abort each asked the clock for itself


def test_the_account_reads_as_text(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    record_day(path, 1)
    text = told(why(path, "client-r5")[0])
    first, _, *lines, last = text.splitlines()
    assert re.fullmatch(r"r5 \(client-r5 for its client\): (stop|length|error|abort), \d+\.\d{3} s in all", first)
    assert last.startswith("  together: queued ")
    assert any("prefill in " in line for line in lines)


def test_an_unknown_request_is_refused_with_some_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    record_day(path, 1)
    with pytest.raises(ValueError, match=r"has no request 'nobody'; it begins with r"):
        why(path, "nobody")


def test_the_last_steps_can_be_told_in_lines() -> None:
    engine, log = watched(max_num_seqs=1)
    engine.add(asking("a", max_tokens=40))
    engine.add(asking("b"))
    engine.step()
    engine.step()
    lines = log.tail(2).splitlines()
    assert lines[0].startswith("step 1: 4 prompt tokens, 0 decodes in 2.0000 s; 1 wait, 1 run, ")
    assert lines[1].startswith("step 2: 0 prompt tokens, 1 decodes in 2.0000 s")
    assert lines[2] == "b is queued: every seat is taken"
