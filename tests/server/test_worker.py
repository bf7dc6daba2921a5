"""The loop of the engine's process, run here without one: one report a step, sleep when there is nothing to do."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from queue import SimpleQueue

import fake_engine
import pytest

from turnout.core.types import ContractError, Output, Request, Sampling
from turnout.server.engine import worker
from turnout.server.engine.heartbeat import BEAT, Heartbeat
from turnout.server.engine.messages import (
    Abort,
    Alive,
    Fatal,
    Found,
    Progress,
    Question,
    Reply,
    Report,
    Setup,
    Stop,
    ToEngine,
)
from turnout.server.engine.worker import LoadingReporter, Loop, compute, load


def asking(name: str, num: int = 3, do: str = "") -> Request:
    return Request(name, [1], Sampling(max_tokens=num), labels={"do": do})


def reports(*messages: ToEngine, steps_until_stop: int = 50) -> list[Report]:
    """What the loop says when the messages are there before its first step."""
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    for message in messages:
        inbox.put(message)
    sent: list[Report] = []

    def send(message: object) -> None:
        assert isinstance(message, Report)
        sent.append(message)
        if not message.busy or len(sent) == steps_until_stop:
            inbox.put(Stop())

    Loop(fake_engine.FakeEngine(), inbox, send).run()
    return sent


@contextmanager
def looping(engine: fake_engine.FakeEngine) -> Iterator[tuple[SimpleQueue[ToEngine], list[Report]]]:
    """A loop on a thread, its inbox and what it reported."""
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    sent: list[Report] = []
    thread = threading.Thread(target=Loop(engine, inbox, sent.append).run)  # type: ignore[arg-type]
    thread.start()
    try:
        yield inbox, sent
    finally:
        inbox.put(Stop())
        thread.join(5)
        assert not thread.is_alive()


def test_each_step_is_one_report_with_the_outputs_of_all_requests() -> None:
    sent = reports(asking("a", 3), asking("b", 2))
    assert [[Output._make(fields).request_id for fields in report.outputs] for report in sent] == [["a", "b"]] * 2 + [
        ["a"]
    ]
    assert [report.busy for report in sent] == [True, True, False]


def test_a_report_says_how_many_messages_were_handled() -> None:
    assert [report.handled for report in reports(asking("a", 2), asking("b", 1), Abort("b"))] == [3, 3]


def test_a_refusal_comes_with_the_next_report_and_once() -> None:
    sent = reports(asking("a", 3), asking("b", do="refuse"))
    assert [report.refused for report in sent] == [[("b", "it can never fit: 2000 of 1000 tokens")], [], []]


def test_a_refusal_comes_though_there_is_nothing_to_compute() -> None:
    (only,) = reports(asking("b", do="refuse"))
    assert only.refused and not only.outputs and not only.busy


def test_an_abort_that_empties_the_engine_is_reported_though_no_step_follows() -> None:
    with looping(fake_engine.FakeEngine()) as (inbox, sent):
        inbox.put(asking("a", 900))
        while len(sent) < 3:
            time.sleep(0.001)
        inbox.put(Abort("a"))
        while sent[-1].busy:
            time.sleep(0.001)
        assert sent[-1].handled == 2 and sent[-1].stats.finished == {"abort": 1}


def test_it_takes_no_step_when_idle_and_few_when_the_scheduler_waits() -> None:
    engine = fake_engine.FakeEngine()
    with looping(engine) as (inbox, sent):
        time.sleep(0.2)
        assert engine.stats.num_steps == 0
        inbox.put(asking("a", do="wait"))
        time.sleep(0.5)
        assert 1 < engine.stats.num_steps < 0.5 / fake_engine.STEP, "an empty step pauses on top of its own time"
        assert 2 <= len(sent) <= 4, "empty steps report now and then, not each"


def setup(**config: str) -> Setup:
    return Setup(config, fake_engine.BUILDER, [], None, logging.INFO)


def test_loading_reports_its_progress() -> None:
    sent: list[object] = []
    assert isinstance(load(setup(), sent.append), fake_engine.FakeEngine)
    assert sent == [Progress("reading", 0.5), Found("here"), Progress("reading", 1.0)]


def test_progress_of_one_stage_is_told_now_and_then_and_at_its_end() -> None:
    sent: list[object] = []
    tell = LoadingReporter(sent.append)
    for tensor in range(1001):
        tell("weights", tensor / 1000)
    assert len(sent) < 100 and sent[0] == Progress("weights", 0.0) and sent[-1] == Progress("weights", 1.0)


def test_what_the_user_can_mend_is_told_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[object] = []
    with pytest.raises(SystemExit) as exit_, caplog.at_level(logging.INFO):
        load(setup(load="value error"), sent.append)
    assert (exit_.value.code, sent[-1]) == (1, Fatal("attention=warp is not installed"))
    assert not caplog.records


def test_a_bug_while_loading_is_told_in_a_line_and_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[object] = []
    with pytest.raises(SystemExit) as exit_:
        load(setup(load="bug"), sent.append)
    assert (exit_.value.code, sent[-1]) == (1, Fatal("the engine could not be built: KeyError: 'lm_head'"))
    assert caplog.records[-1].exc_info is not None


def test_a_step_that_raises_ends_the_process_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    inbox.put(asking("guilty", do="raise"))
    sent: list[object] = []
    with pytest.raises(SystemExit) as exit_:
        compute(fake_engine.FakeEngine(), inbox, sent.append)
    assert (exit_.value.code, sent) == (1, [Fatal("the engine failed: RuntimeError: the scheduler lost its mind")])
    assert caplog.records[-1].exc_info is not None


class Left(BaseException):
    """Instead of the end of the process."""


def _leave(code: int) -> None:
    raise Left(code)


def test_the_end_of_the_parents_pipe_ends_the_process_whatever_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", _leave)
    ours, theirs = Pipe(duplex=False)
    theirs.send_bytes(pickle.dumps(Abort("a")))
    theirs.close()
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    with ours, pytest.raises(Left):
        worker._listen(ours, inbox)
    assert inbox.get_nowait() == Abort("a")


def test_a_report_that_nobody_reads_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", _leave)
    theirs, ours = Pipe(duplex=False)
    theirs.close()
    with ours, pytest.raises(Left):
        worker._sender(ours)(Progress("weights", 0.5))


def test_a_question_is_answered_between_steps_and_counts_as_a_message() -> None:
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    for message in (asking("a", 2), Question(7, "request", "a"), Question(8, "engine")):
        inbox.put(message)
    sent: list[object] = []

    def send(message: object) -> None:
        sent.append(message)
        if isinstance(message, Report) and not message.busy:
            inbox.put(Stop())

    Loop(fake_engine.FakeEngine(), inbox, send).run()
    assert sent[:2] == [
        Reply(7, {"topic": "request", "name": "a", "open": ["a"]}),
        Reply(8, {"topic": "engine", "name": "", "open": ["a"]}),
    ]
    assert isinstance(sent[2], Report) and sent[2].handled == 3


def test_an_idle_engine_answers_at_once() -> None:
    with looping(fake_engine.FakeEngine()) as (inbox, sent):
        inbox.put(Question(1, "engine"))
        while not any(isinstance(message, Reply) for message in sent):
            time.sleep(0.001)


def test_however_it_ends_what_watches_the_engine_is_closed() -> None:
    stopped, failed = fake_engine.FakeEngine(), fake_engine.FakeEngine()
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    inbox.put(Stop())
    compute(stopped, inbox, lambda message: None)
    inbox.put(asking("a", do="raise"))
    with pytest.raises(SystemExit):
        compute(failed, inbox, lambda message: None)
    assert stopped.closed and failed.closed


def test_a_scheduler_that_fails_now_and_then_costs_nothing_and_one_that_goes_on_failing_costs_its_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "turnout.engine")
    sent = reports(asking("a", 3), asking("b", do="break"), steps_until_stop=20)
    outputs = [Output._make(fields) for report in sent for fields in report.outputs]
    assert [(o.request_id, o.error) for o in outputs] == [
        (rid, "the scheduler Odd failed: KeyError: 7") for rid in "ab"
    ]
    engine, inbox = fake_engine.FakeEngine(), SimpleQueue[ToEngine]()
    inbox.put(asking("a", 9))
    real, calls = engine.step, iter(range(100))

    def step() -> list[Output]:
        if next(calls) % 3:
            raise ContractError("the scheduler Odd failed: KeyError: 7")
        return real()

    engine.step = step  # type: ignore[method-assign]
    found: list[Output] = []

    def send(message: object) -> None:
        assert isinstance(message, Report)
        found.extend(Output._make(fields) for fields in message.outputs)
        if not message.busy:
            inbox.put(Stop())

    Loop(engine, inbox, send).run()
    assert [token for output in found for token in output.tokens] == list(range(9))


class TestHeartbeat:
    def test_it_beats_while_something_is_under_way_and_says_how_long(self) -> None:
        sent: list[object] = []
        heartbeat = Heartbeat(lambda seconds: f"{seconds:.1f}" if seconds >= 2 * BEAT else None, sent.append)
        heartbeat.beat()
        assert sent == []
        heartbeat.begin()
        for _ in range(3):
            heartbeat.beat()
        assert sent == [Alive(None), Alive(None), Alive(f"{2 * BEAT:.1f}")]
        heartbeat.begin()
        heartbeat.beat()
        assert sent[-1] == Alive(None)
        heartbeat.rest()
        heartbeat.beat()
        assert len(sent) == 4
