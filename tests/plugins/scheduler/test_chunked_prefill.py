"""Chunked prefill: streams first, prompts in chunks, and a step time that is kept."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from virtual import LAW, TimedRunner, ask, drive, first_chunks, timed_engine

from turnout.core import Request, Step
from turnout.core.model import Result
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import make_engine, serve_all

ROOM = {"num_blocks": 600, "block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 16}


def streams_and_a_document(num_tokens: int = 4000) -> list[Request]:
    """Eight streams; a long prompt arrives amid them."""
    streams = [ask(str(i), 20, 300, first=37 * i) for i in range(8)]
    return [*streams, ask("document", num_tokens, 4, first=500, arrived=1.2)]


def gaps(scheduler: Any, requests: list[Request] | None = None, runner: type[TimedRunner] = TimedRunner) -> list[float]:
    """Between the tokens of the streams, while the document is computed."""
    engine, clock = timed_engine(scheduler, **ROOM)
    engine._runner = runner(clock, LAW, ROOM["num_blocks"], ROOM["block_size"])
    times = drive(engine, requests or streams_and_a_document())
    ready = times["document"][0]
    return [b - a for i in range(8) for a, b in pairwise(times[str(i)]) if 1.2 < b <= ready]


class TestFixedChunks:
    def test_every_stream_gets_its_token_in_every_step_and_prompts_share_the_rest_oldest_first(self) -> None:
        engine, _ = timed_engine(ChunkedPrefill(chunk=6, max_prefill_tokens=10), num_blocks=100)
        drive(
            engine, [ask("a", 6, 9), ask("b", 12, 2, first=50, arrived=1.001), ask("c", 12, 2, first=90, arrived=1.001)]
        )
        steps = [[(c.request.id, c.num_tokens) for c in step.chunks] for step in engine._runner.steps]  # type: ignore[attr-defined]
        assert steps[:5] == [
            [("a", 6)],
            [("a", 1), ("b", 6), ("c", 4)],
            [("a", 1), ("b", 6), ("c", 4)],
            [("a", 1), ("b", 1), ("c", 4)],
            [("a", 1), ("c", 1)],
        ]

    def test_prompts_under_way_make_room_before_streams_do(self) -> None:
        engine = make_engine(ChunkedPrefill(chunk=1), num_blocks=8)
        prompt, streams = ask("prompt", 20, 2, first=500), [ask(str(i), 3, 9, first=100 * i) for i in range(2)]
        for request in (prompt, *streams):
            engine.add(request)
        for _ in range(60):
            if engine.busy:
                engine.step()
        assert not engine.busy and prompt.num_preemptions > 0
        assert [stream.num_preemptions for stream in streams] == [0, 0]

    def test_a_document_makes_the_gaps_as_long_as_its_chunks(self) -> None:
        assert 0.1 < max(gaps(ChunkedPrefill())) < 0.15
        assert max(gaps(FCFS())) > 0.8

    @pytest.mark.parametrize("name", ["chunk", "max_prefill_tokens", "max_long_partial_prefills"])
    def test_a_limit_below_one_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"scheduler.{name} must be at least 1, got 0"):
            ChunkedPrefill(**{name: 0})


class TestTargetItl:
    @pytest.mark.parametrize("target", [0.02, 0.05, 0.08])
    def test_no_gap_exceeds_the_target_while_a_document_is_computed_as_fixed_chunks_do(self, target: float) -> None:
        kept = gaps(ChunkedPrefill(target_itl=target))
        assert target * 0.9 < max(kept) <= target
        assert max(gaps(ChunkedPrefill())) > target

    def test_nine_in_ten_gaps_keep_it_where_steps_take_twice_as_long_or_half_at_random(self) -> None:
        class Noisy(TimedRunner):
            def run(self, step: Step) -> Result:
                before = self.clock.now
                result = super().run(step)
                self.clock.now = before + (self.clock.now - before) * dice.lognormvariate(0, 0.3)
                return result

        dice = random.Random(0)
        found = sorted(gaps(ChunkedPrefill(target_itl=0.05), runner=Noisy))
        assert found[int(len(found) * 0.9)] < 0.05

    def test_while_no_stream_runs_a_prompt_gets_the_whole_budget(self) -> None:
        engine, _ = timed_engine(ChunkedPrefill(target_itl=0.02), **ROOM)
        drive(engine, [ask("document", 4000, 1)])
        assert [step.num_tokens for step in engine._runner.steps] == [2048, 1952]  # type: ignore[attr-defined]

    def test_a_target_that_streams_alone_exceed_still_lets_the_oldest_prompt_come_further(self) -> None:
        engine, _ = timed_engine(ChunkedPrefill(target_itl=1e-6), **ROOM)
        drive(engine, [*streams_and_a_document(400), ask("second", 100, 2, first=700, arrived=1.2)])
        chunks = [c for step in engine._runner.steps for c in step.chunks if c.num_tokens > 1]  # type: ignore[attr-defined]
        late = [(c.request.id, c.num_tokens) for c in chunks if c.request.id in ("document", "second")]
        assert late == [("document", 16)] * 25 + [("second", 16)] * 6 + [("second", 4)]

    def test_a_target_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="scheduler.target_itl must be more than 0 seconds, got 0"):
            ChunkedPrefill(target_itl=0)


class TestLongPrompts:
    def test_so_many_are_computed_at_once_and_shorter_ones_pass(self) -> None:
        scheduler = ChunkedPrefill(chunk=8, long_prefill_token_threshold=20, max_long_partial_prefills=2)
        engine, _ = timed_engine(scheduler, **ROOM)
        asked = [ask(f"long{i}", 100, 2, first=100 * i) for i in range(4)] + [ask("short", 10, 2, first=600)]
        most = []
        drive(engine, asked, lambda: most.append(sum(r.num_pending > 20 for r in engine.running if r.num_pending > 1)))
        assert first_chunks(engine) == ["long0", "long1", "short", "long2", "long3"]
        assert max(most) == 2

    def test_nobody_passes_one_whose_turn_it_is(self) -> None:
        scheduler = ChunkedPrefill(chunk=8, long_prefill_token_threshold=20)
        engine, _ = timed_engine(scheduler, num_blocks=20, max_num_seqs=4)
        asked = [ask("long0", 40, 2), ask("long1", 60, 2, first=100)]
        asked += [ask(str(i), 8, 8, first=200 + 20 * i, arrived=1.0001 + i * 0.01) for i in range(30)]
        drive(engine, asked)
        order = first_chunks(engine)
        done = next(c.request.arrived for s in engine._runner.steps for c in s.chunks if c.request.id == "long1")  # type: ignore[attr-defined]
        assert done == 1.0 and order.index("long1") < 10

    def test_a_prompt_says_why_it_waits(self) -> None:
        seen = {}

        class Spy(ChunkedPrefill):
            def schedule(self, waiting: Any, running: Any, draft: Any) -> None:
                super().schedule(waiting, running, draft)
                seen.update(draft.reasons)

        serve_all(
            make_engine(Spy(chunk=4, long_prefill_token_threshold=5)), [ask("a", 20, 2), ask("b", 20, 2, first=99)]
        )
        assert seen["b"] == "1 long prompts are being computed"

    def test_a_negative_threshold_is_refused(self) -> None:
        with pytest.raises(ValueError, match="long_prefill_token_threshold must be 0 .none. or more, got -1"):
            ChunkedPrefill(long_prefill_token_threshold=-1)
