"""Deadline: least slack first, by targets of its own or of the request."""

from __future__ import annotations

from itertools import pairwise

import pytest
from virtual import ask, drive, first_chunks, timed_engine

from turnout.core import Request
from turnout.plugins.scheduler import Deadline

ROOM = {"num_blocks": 600, "block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 16}


class TestOrder:
    def test_the_first_token_due_earliest_is_computed_first(self) -> None:
        engine, _ = timed_engine(Deadline(), max_num_seqs=1)
        targets = {"a": "5", "b": "0.2", "c": "3", "d": "0.4"}
        drive(engine, [ask(name, 4, 2, ttft_target=target) for name, target in targets.items()])
        assert first_chunks(engine) == ["b", "d", "c", "a"]

    def test_of_two_that_are_due_alike_the_one_that_takes_longer_to_compute_goes_first(self) -> None:
        engine, _ = timed_engine(Deadline(), max_num_seqs=1, num_blocks=100)
        drive(engine, [ask("short", 4, 2), ask("long", 200, 2, first=50)])
        assert first_chunks(engine) == ["long", "short"]

    @pytest.mark.parametrize(("arrives", "order"), [(1.3, ["lax", "strict"]), (0.9, ["strict", "lax"])])
    def test_a_strict_one_passes_a_lax_one_only_within_the_difference_of_their_targets(
        self, arrives: float, order: list[str]
    ) -> None:
        engine, _ = timed_engine(Deadline(), max_num_seqs=1, num_blocks=200)
        runs = ask("runs", 4, 400, arrived=0.5, ttft_target="0.1")
        lax = ask("lax", 4, 2, arrived=0.6, ttft_target="1")
        drive(engine, [runs, lax, ask("strict", 4, 2, arrived=arrives, ttft_target="0.4")])
        assert first_chunks(engine) == ["runs", *order]

    @pytest.mark.parametrize("label", ["soon", "nan", "-1", "0", "inf"])
    def test_a_label_that_is_no_number_of_seconds_leaves_the_default_and_says_so(self, label: str) -> None:
        reasons: dict[str, str] = {}

        class Spy(Deadline):
            def schedule(self, waiting, running, draft) -> None:  # type: ignore[no-untyped-def]
                super().schedule(waiting, running, draft)
                reasons.update(draft.reasons)

        engine, _ = timed_engine(Spy(ttft_target=2.0), max_num_seqs=1)
        asked = [ask("a", 4, 2, ttft_target="3"), ask("b", 4, 2, ttft_target=label), ask("c", 4, 2, ttft_target="1")]
        drive(engine, asked)
        assert first_chunks(engine) == ["c", "b", "a"]
        assert f"its label ttft_target={label!r} is no number of seconds" in reasons["b"]

    @pytest.mark.parametrize("name", ["ttft_target", "itl_target"])
    def test_impossible_options_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"scheduler.{name} must be more than 0 seconds, got 0"):
            Deadline(**{name: 0})


class TestStreams:
    def test_prompts_leave_the_tightest_stream_its_target(self) -> None:
        engine, _ = timed_engine(Deadline(), **ROOM)
        streams = [ask(str(i), 20, 300, first=37 * i, itl_target="0.03" if i == 3 else "0.2") for i in range(8)]
        times = drive(engine, [*streams, ask("document", 4000, 4, first=500, arrived=1.2)])
        ready = times["document"][0]
        gaps = [b - a for a, b in pairwise(times["3"]) if 1.2 < b <= ready]
        assert 0.02 < max(gaps) <= 0.03

    def test_the_most_pressing_prompt_comes_further_even_where_streams_alone_exceed_their_target(self) -> None:
        engine, _ = timed_engine(Deadline(itl_target=1e-6), **ROOM)
        streams = [ask(str(i), 20, 100, first=37 * i) for i in range(8)]
        drive(
            engine,
            [
                *streams,
                ask("lax", 100, 2, first=300, arrived=1.2),
                ask("strict", 100, 2, first=500, arrived=1.2, ttft_target="0.2"),
            ],
        )
        chunks = [c for step in engine._runner.steps for c in step.chunks if c.num_tokens > 1]  # type: ignore[attr-defined]
        late = [(c.request.id, c.num_tokens) for c in chunks if c.request.id in ("lax", "strict")]
        assert late == [(name, n) for name in ("strict", "lax") for n in (16, 16, 16, 16, 16, 16, 4)]

    def test_out_of_blocks_the_stream_with_the_most_time_makes_room(self) -> None:
        engine, _ = timed_engine(Deadline(), num_blocks=9)
        asked: list[Request] = [
            ask(name, 8, 14, first=100 * i, itl_target=target)
            for i, (name, target) in enumerate([("a", "1"), ("lax", "9"), ("b", "1")])
        ]
        for request in asked:
            engine.add(request)
        engine.step()
        while not engine.waiting:
            engine.step()
        assert [request.id for request in engine.waiting] == ["lax"]
