"""A served day with the real model: recorded, watched while it runs, replayed and explained afterwards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from turnout.lab import top
from turnout.lab.record.perfetto import export, load
from turnout.lab.record.replay import replay
from turnout.server.steplog.why import why

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from conftest import Served


def test_a_served_day_is_recorded_watched_replayed_and_explained(
    serve: Callable[..., Served], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day, trace = tmp_path / "a day.jsonl", tmp_path / "day.json"
    small = ("blocks.num_blocks=7", "limits.max_num_seqs=3", "limits.max_model_len=100", "preemption=swap")
    chunked = ("scheduler=chunked_prefill", "scheduler.chunk=8", "scheduler.max_prefill_tokens=12")
    served = serve("dtype=float32", "server.debug=true", f"record={day}", *small, *chunked).ready()
    assert "All requests are recorded in" in served.output

    def complete(number: int) -> dict[str, object]:
        prompt = [(number * 7 + place) % 1000 + 20 for place in range(24)]
        return served.complete(prompt, max_tokens=12, ignore_eos=True, request_id=f"mine-{number}")

    with ThreadPoolExecutor(5) as pool:
        replies = list(pool.map(complete, range(5)))
    (live,) = served.http.get(f"/debug/requests/{replies[4]['id']}").json()["requests"]
    assert live["state"] == "length" and live["generated_tokens"] == 12
    assert sum(piece["seconds"] for piece in live["pieces"]) == pytest.approx(live["seconds"])
    assert top.run([f"url={served.url}", "every=0.1", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "block_manager=paged" in shown and "free" in shown, "no plugins, or no steps"
    assert served.metric("vllm:num_preemptions_total") > 0, "the day was too quiet to prove anything"
    assert served.stop() == 0

    result = replay(day)
    assert (result.num_requests, result.difference) == (5, None)
    (told,) = why(day, "mine-4")
    assert told == live
    export(day, trace)
    assert sum(event["name"] == "request, length" for event in load(trace)) == 5
