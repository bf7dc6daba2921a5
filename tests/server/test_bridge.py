"""Requests cross to the engine's process and their outputs come back; what goes wrong there is told here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import fake_engine
import psutil
import pytest

from turnout.core.types import Finish, Output, Request, Sampling, Stats
from turnout.server.engine import bridge
from turnout.server.engine.bridge import EngineError, EngineProcess
from turnout.server.engine.messages import Abort, BeamSearch, Fatal, Ready, Reply, Report, Stop

STALL = 0.8  # seconds

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


def asking(name: str, num: int = 3, do: str = "") -> Request:
    return Request(name, [1, 2], Sampling(max_tokens=num), labels={"do": do})


async def counted(engine: EngineProcess, request: Request) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.tokens]


async def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


def new_engine(**config: str) -> EngineProcess:
    return EngineProcess(config, builder=fake_engine.BUILDER, stall_timeout=STALL)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[EngineProcess, Run[Any]]]:
    """One healthy engine for all tests that leave it so, and the way to run a coroutine beside it."""
    with asyncio.Runner() as runner:

        async def start() -> EngineProcess:
            engine = new_engine()
            engine.start()
            assert engine.trouble() == "loading"
            with pytest.raises(EngineError, match="loading"):
                await counted(engine, asking("early"))
            assert await engine.found() == "here"
            await engine.ready()
            assert engine.trouble() is None
            return engine

        engine = runner.run(start())
        yield engine, runner.run
        runner.run(engine.stop())


class TestHealthy:
    def test_requests_side_by_side_get_their_own_outputs_in_order(
        self, running: tuple[EngineProcess, Run[Any]]
    ) -> None:
        engine, run = running
        order: list[str] = []

        async def watched(name: str, num: int) -> list[int]:
            tokens = []
            async for output in engine.generate(asking(name, num)):
                order.append(name)
                tokens += output.tokens
            return tokens

        async def all_of_them() -> list[list[int]]:
            return await asyncio.gather(watched("a", 6), watched("b", 3), watched("c", 5))

        assert run(all_of_them()) == [list(range(6)), list(range(3)), list(range(5))]
        assert order[:6] != sorted(order[:6]), "one request was answered after the other"

    def test_info_and_stats_are_the_engines(self, running: tuple[EngineProcess, Run[Any]]) -> None:
        engine, run = running
        before = engine.stats.generated_tokens
        run(counted(engine, asking("a", 4)))
        assert engine.info == fake_engine.INFO
        assert engine.stats.generated_tokens == before + 4
        assert engine.stats.num_running == 0

    def test_a_reader_that_leaves_aborts_its_request_and_no_other(
        self, running: tuple[EngineProcess, Run[Any]]
    ) -> None:
        engine, run = running

        async def leave_one() -> list[int]:
            other = asyncio.create_task(counted(engine, asking("stays", 30)))
            async with aclosing(engine.generate(asking("leaves", 900))) as outputs:
                async for output in outputs:
                    if output.tokens[0] == 2:
                        break
            await until(lambda: engine.stats.finished.get("abort", 0) == 1)
            assert engine.stats.num_running == 1
            return await other

        assert run(leave_one()) == list(range(30))

    def test_a_cancelled_reader_aborts_its_request(self, running: tuple[EngineProcess, Run[Any]]) -> None:
        engine, run = running
        before = engine.stats.finished.get("abort", 0)

        async def cancel() -> None:
            reader = asyncio.create_task(counted(engine, asking("a", 900)))
            await until(lambda: engine.stats.num_running == 1)
            reader.cancel()
            await until(lambda: engine.stats.num_running == 0)

        run(cancel())
        assert engine.stats.finished["abort"] == before + 1

    def test_a_refused_request_raises_the_engines_reason(self, running: tuple[EngineProcess, Run[Any]]) -> None:
        engine, run = running
        with pytest.raises(ValueError, match="2000 of 1000 tokens"):
            run(counted(engine, asking("a", do="refuse")))
        assert run(counted(engine, asking("a"))) == [0, 1, 2], "the id is free again"

    def test_a_beam_search_has_all_its_answers_in_one_stream(self, running: tuple[EngineProcess, Run[Any]]) -> None:
        engine, run = running

        async def both() -> tuple[list[Output], list[int]]:
            async def search() -> list[Output]:
                return [output async for output in engine.generate(BeamSearch(asking("a"), ("a", "b", "c"), 3))]

            return await asyncio.gather(search(), counted(engine, asking("plain", 5)))

        outputs, tokens = run(both())
        assert [(o.request_id, list(o.tokens)) for o in outputs] == [
            ("a", [0, 1, 2]),
            ("b", [1, 2, 3]),
            ("c", [2, 3, 4]),
        ]
        assert tokens == list(range(5)) and not engine.num_open

    def test_leaving_a_beam_search_aborts_it_and_frees_its_ids(self, running: tuple[EngineProcess, Run[Any]]) -> None:
        engine, run = running
        before = engine.stats.finished.get("abort", 0)

        async def leave() -> None:
            search = engine.generate(BeamSearch(asking("a", 900), ("a", "b"), 2))
            reader = asyncio.create_task(anext(search))  # type: ignore[arg-type]
            await until(lambda: engine.stats.num_running == 1)
            for taken in (asking("b"), BeamSearch(asking("c"), ("c", "b"), 2)):
                with pytest.raises(ValueError, match="'b' is already in use"):
                    await anext(engine.generate(taken))
            reader.cancel()
            await until(lambda: engine.stats.num_running == 0)

        run(leave())
        assert engine.stats.finished["abort"] == before + 1 and not engine.num_open

    def test_a_refused_beam_search_raises_the_engines_reason(self, running: tuple[EngineProcess, Run[Any]]) -> None:
        engine, run = running
        with pytest.raises(ValueError, match="2000 of 1000 tokens"):
            run(anext(engine.generate(BeamSearch(asking("a", do="refuse"), ("a", "b"), 2))))  # type: ignore[arg-type]
        assert not engine.num_open

    def test_a_request_that_fails_alone_ends_with_its_error(self, running: tuple[EngineProcess, Run[Any]]) -> None:
        engine, run = running

        async def both() -> tuple[list[Output], list[int]]:
            async def failing() -> list[Output]:
                return [output async for output in engine.generate(asking("fails", 5, do="error"))]

            return await asyncio.gather(failing(), counted(engine, asking("stays", 5)))

        outputs, tokens = run(both())
        assert (outputs[-1].finish, outputs[-1].error) == (Finish.ERROR, "its logits are not finite")
        assert tokens == list(range(5))
        assert engine.trouble() is None

    def test_an_id_in_use_is_refused(self, running: tuple[EngineProcess, Run[Any]]) -> None:
        engine, run = running

        async def twice() -> None:
            first = asyncio.create_task(counted(engine, asking("same", 20)))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="'same' is already in use"):
                await counted(engine, asking("same"))
            assert await first == list(range(20))

        run(twice())

    def test_a_question_is_answered_while_requests_are_computed(self, running: tuple[EngineProcess, Run[Any]]) -> None:
        engine, run = running

        async def scenario() -> None:
            task = asyncio.create_task(counted(engine, asking("asked about", 40)))
            await asyncio.sleep(0.02)
            answers = await asyncio.gather(engine.ask("request", "asked about"), engine.ask("engine"))
            assert [answer["topic"] for answer in answers] == ["request", "engine"]
            assert answers[0]["open"] == ["asked about"] and not task.done()
            assert await task == list(range(40))

        run(scenario())

    @pytest.mark.parametrize("do", ["idle", "slow", "wait"])
    def test_neither_rest_nor_slow_steps_nor_a_waiting_scheduler_counts_as_frozen(
        self, running: tuple[EngineProcess, Run[Any]], do: str
    ) -> None:
        engine, run = running

        async def pass_time() -> None:
            reader = asyncio.create_task(counted(engine, asking("a", 900, do))) if do != "idle" else None
            await asyncio.sleep(1.5 * STALL)
            if reader is not None:
                reader.cancel()
            await until(lambda: engine.stats.num_running == 0)

        run(pass_time())
        assert engine.trouble() is None

    def test_a_step_that_takes_longer_than_the_stall_timeout_is_waited_for(
        self, running: tuple[EngineProcess, Run[Any]]
    ) -> None:
        engine, run = running
        assert run(counted(engine, asking("long", 1, do="long"))) == [0] and engine.trouble() is None

    def test_a_scheduler_that_breaks_down_ends_its_requests_and_the_engine_serves_on(
        self, running: tuple[EngineProcess, Run[Any]]
    ) -> None:
        engine, run = running

        async def scenario() -> None:
            found = [output.error async for output in engine.generate(asking("guilty", 5, do="break"))]
            assert found == ["the scheduler Odd failed: KeyError: 7"]
            assert await counted(engine, asking("next", 3)) == [0, 1, 2] and engine.trouble() is None

        run(scenario())


async def failures(engine: EngineProcess, *requests: Request) -> list[BaseException | list[int]]:
    return await asyncio.gather(*(counted(engine, request) for request in requests), return_exceptions=True)


def test_a_frozen_process_is_told_after_the_stall_timeout_and_ended() -> None:
    async def scenario() -> None:
        engine = new_engine()
        engine.start()
        await engine.ready()
        began = asyncio.get_running_loop().time()
        found = await failures(engine, asking("a", 900), asking("guilty", do="freeze"))
        took = asyncio.get_running_loop().time() - began
        assert STALL <= took < 5 * STALL
        assert all(isinstance(error, EngineError) and "frozen" in str(error) for error in found)
        assert "server.stall_timeout" in (engine.trouble() or "")
        await until(lambda: not psutil.pid_exists(engine.pid or 0))
        await engine.stop()

    asyncio.run(scenario())


def test_a_step_that_hangs_is_told_with_the_place_where_it_does(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        engine = new_engine()
        engine.start()
        await engine.ready()
        found = await failures(engine, asking("a", 900), asking("guilty", do="hang"))
        assert all(isinstance(error, EngineError) and "hangs: a step takes" in str(error) for error in found)
        await until(lambda: not psutil.pid_exists(engine.pid or 0))
        await engine.stop()

    asyncio.run(scenario())
    assert "in misbehave" in capfd.readouterr().err, "the log does not say where it hung"


class SilentChild:
    """Stands in for the process: takes messages, says only what a test says for it."""

    pid = 0

    def __init__(self, *_: object, on_message: Callable[[object], None], on_exit: Callable[[int], None], **__: object):
        self.says, self._on_exit = on_message, on_exit
        self.heard: list[object] = []
        self.killed = False
        asyncio.get_running_loop().call_soon(self.says, Ready(fake_engine.INFO))

    def send(self, message: object) -> None:
        self.heard.append(message)

    def kill(self) -> None:
        if not self.killed:
            self.killed = True
            asyncio.get_running_loop().call_soon(self._on_exit, -9)

    kill_with_traceback = kill

    def reports(self, *outputs: Output, handled: int, busy: bool = True) -> None:
        self.says(Report(handled, busy, [tuple(output) for output in outputs], [], Stats()))


class TestOnThisSide:
    """What is known without a process."""

    @pytest.fixture(autouse=True)
    def _no_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bridge, "ChildProcess", SilentChild)
        monkeypatch.setattr(bridge, "STOP_TIMEOUT", 0.05)

    @staticmethod
    async def started(stall_timeout: float = 0.2) -> tuple[EngineProcess, SilentChild]:
        engine = EngineProcess({}, stall_timeout=stall_timeout)
        engine.start()
        await engine.ready()
        child = engine._process
        assert isinstance(child, SilentChild)
        return engine, child

    def test_draining_refuses_new_requests_and_lets_open_ones_end_until_the_time_is_up(self) -> None:
        async def scenario() -> None:
            engine, child = await self.started()
            open_ones = asyncio.create_task(failures(engine, asking("short"), asking("endless")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            engine.drain()
            assert engine.trouble() == "draining"
            with pytest.raises(EngineError, match="draining"):
                await counted(engine, asking("late"))
            child.reports(Output("short", (7,), Finish.LENGTH), Output("endless", (8,)), handled=2)
            assert not await engine.drained(timeout=0.05)
            tokens, error = await open_ones
            assert tokens == [7]
            assert isinstance(error, EngineError) and error.status == 503 and "did not end in time" in str(error)
            assert child.heard[2:] == [Abort("endless")]
            assert await engine.drained(timeout=0.05), "nothing is open"
            await engine.stop()
            assert child.heard[3:] == [Stop()]

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        ("code", "words"), [(-9, "SIGKILL, often sent when memory runs out"), (-11, "SIGSEGV"), (3, "exit code 3")]
    )
    def test_a_process_that_dies_fails_every_open_request(self, code: int, words: str) -> None:
        async def scenario() -> None:
            engine, child = await self.started()
            child.killed = True
            asyncio.get_running_loop().call_later(0.05, child._on_exit, code)
            for error in await failures(engine, asking("a"), asking("b")):
                assert isinstance(error, EngineError) and error.status == 503
                assert str(error) == engine.trouble() == f"the engine process died: {words}"
            await engine.stop()

        asyncio.run(scenario())

    def test_an_engine_that_fails_gives_every_open_request_its_reason_and_later_ones_too(self) -> None:
        async def scenario() -> None:
            engine, child = await self.started()
            asyncio.get_running_loop().call_later(0.05, child.says, Fatal("the engine failed: RuntimeError: lost"))
            for error in await failures(engine, asking("a"), asking("b")):
                assert isinstance(error, EngineError) and error.status == 503 and "RuntimeError: lost" in str(error)
            with pytest.raises(EngineError, match="lost"):
                await counted(engine, asking("late"))
            await until(lambda: child.killed, 1.0)  # a process that says so and stays is ended
            assert engine.ended and engine.trouble() == "the engine failed: RuntimeError: lost"
            await engine.stop()

        asyncio.run(scenario())

    def test_a_question_to_an_engine_that_fails_ends_with_the_reason(self) -> None:
        async def scenario() -> None:
            engine = new_engine()
            engine.start()
            with pytest.raises(EngineError, match="loading"):
                await engine.ask("engine")
            await engine.ready()
            left = asyncio.create_task(engine.ask("engine"))
            task = asyncio.create_task(engine.ask("engine"))
            await asyncio.sleep(0)
            left.cancel()
            assert isinstance(engine._process, SilentChild)
            assert [message[:2] for message in engine._process.heard] == [(1, "engine"), (2, "engine")]  # type: ignore[index]
            engine._process.says(Reply(1, "nobody waits"))
            engine._process.says(Fatal("the device is gone"))
            for asked in (task, engine.ask("engine")):
                with pytest.raises(EngineError, match="the device is gone"):
                    await asked
            await engine.stop()

        asyncio.run(scenario())

    def test_outputs_of_unknown_requests_are_dropped(self) -> None:
        async def scenario() -> None:
            engine, child = await self.started()
            child.reports(Output("nobody", (1,)), Output("nobody", (2,), Finish.STOP), handled=0, busy=False)
            assert engine.trouble() is None and engine.num_open == 0
            await engine.stop()

        asyncio.run(scenario())

    def test_a_frozen_engine_is_told_though_its_readers_have_left(self) -> None:
        async def scenario() -> None:
            engine, child = await self.started()
            reader = asyncio.create_task(counted(engine, asking("a")))
            await asyncio.sleep(0)
            reader.cancel()
            await until(lambda: engine.trouble() is not None, 1.0)
            assert "frozen" in (engine.trouble() or "") and child.killed
            await engine.stop()

        asyncio.run(scenario())

    def test_silence_counts_from_the_last_sign_of_life(self) -> None:
        async def scenario() -> None:
            engine, child = await self.started()
            reader = asyncio.create_task(failures(engine, asking("a")))
            for token in range(8):
                await asyncio.sleep(0.1)
                child.reports(Output("a", (token,)), handled=1)
            assert engine.trouble() is None
            assert isinstance((await reader)[0], EngineError), "it fell silent"
            await engine.stop()

        asyncio.run(scenario())

    def test_a_stall_timeout_of_zero_waits_for_ever(self) -> None:
        async def scenario() -> None:
            engine, _ = await self.started(stall_timeout=0.0)
            reader = asyncio.create_task(failures(engine, asking("a")))
            await asyncio.sleep(0.5)
            assert engine.trouble() is None
            await engine.stop()
            assert "the server is stopping" in str((await reader)[0])

        asyncio.run(scenario())

    def test_a_process_that_does_not_leave_when_told_to_is_killed(self) -> None:
        async def scenario() -> None:
            engine, child = await self.started()
            await engine.stop()
            assert child.killed

        asyncio.run(scenario())
