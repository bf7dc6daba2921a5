"""Steps computed by a worker while the next is scheduled: every request gets what it gets without."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from engines import engine_on, outputs_of, words
from models import VOCAB, save

from turnout.core import Request, Sampling, Step
from turnout.core.engine import Engine
from turnout.core.model import Limits, Result
from turnout.plugins.loader import model as loading
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.runner import LocalRunner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> loading.Model:
    folder: Path = save("qwen2", tmp_path_factory.mktemp("tiny"))
    return loading.load(loading.inspect(str(folder), "float32", "cpu"), Unquantized())


def started(model: loading.Model, asynchronous: bool, policy: Any, num_blocks: int) -> Engine:
    runner = LocalRunner(async_scheduling=asynchronous)
    runner.prepare(model.info, Limits(max_model_len=256), lambda stage, share: None)
    return engine_on(
        model,
        num_blocks=num_blocks,
        block_size=4,
        preemption=policy,
        runner=runner,
        max_num_seqs=6,
        max_num_batched_tokens=48,
    )


LOOKS_BACK: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "temperature": 0.8},
    {"frequency_penalty": 0.4},
    {"prompt_logprobs": 1},
]
LOOKS_AHEAD_ONLY: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 20},
    {"stop_ids": frozenset(range(0, VOCAB, 3))},
    {"stop_ids": frozenset(range(0, VOCAB, 3)), "min_tokens": 4},
    {"logprobs": 2},
    {"forced": (5, 6, 7, 8)},
    {"logit_bias": {9: 5.0}},
    {"max_tokens": 1},
    {"max_tokens": 0},
]


def traffic(kinds: list[dict[str, Any]]) -> list[Request]:
    return [
        Request(
            f"r{i}",
            words(2 + 7 * i % 19, i, VOCAB),
            Sampling(**({"temperature": 0, "seed": i, "max_tokens": 3 + 5 * i % 23} | kind)),
        )
        for i, kind in enumerate(kinds * 2)
    ]


@pytest.mark.parametrize("policy", [Recompute(), Swap(host_blocks=12)], ids=["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [20, 200])
@pytest.mark.parametrize("kinds", [LOOKS_AHEAD_ONLY, LOOKS_AHEAD_ONLY + LOOKS_BACK], ids=["ahead", "mixed"])
def test_every_request_gets_the_same_tokens_log_probabilities_and_end(
    model: loading.Model, policy: Any, num_blocks: int, kinds: list[dict[str, Any]]
) -> None:
    found = []
    for asynchronous in (False, True):
        engine = started(model, asynchronous, policy, num_blocks)
        outputs = outputs_of(engine, traffic(kinds))
        found.append(
            {
                rid: (
                    [t for o in each for t in o.tokens],
                    [(m.token, m.rank, round(m.logprob, 3)) for o in each for m in (*o.logprobs, *o.prompt_logprobs)],
                    each[-1].finish,
                    each[-1].error,
                )
                for rid, each in outputs.items()
            }
        )
        assert engine.stats.num_blocks_free == num_blocks
        assert bool(engine.stats.preemptions_recompute + engine.stats.preemptions_swap) is (num_blocks == 20)
    assert found[0] == found[1]


def test_a_step_is_computed_by_the_worker_while_this_thread_goes_on(model: loading.Model, monkeypatch: Any) -> None:
    engine = started(model, True, Recompute(), 64)
    runner: Any = engine._runner
    scheduled, computing = threading.Event(), runner._computed

    def waiting(host_batch: Any, constraint: Any) -> Result:
        assert scheduled.wait(30), "the next step is scheduled only when this one is done"
        return computing(host_batch, constraint)  # type: ignore[no-any-return]

    monkeypatch.setattr(runner, "_computed", waiting)
    engine.add(Request("a", [1, 2, 3], Sampling(0, max_tokens=3)))
    assert engine.step() == []
    submit = runner.submit

    def submitting(step: Step) -> Any:
        future = submit(step)
        scheduled.set()
        return future

    monkeypatch.setattr(runner, "submit", submitting)
    assert [len(o.tokens) for o in engine.step()] == [1]


def test_a_failure_in_the_worker_is_an_error_of_the_requests(model: loading.Model, monkeypatch: Any) -> None:
    engine = started(model, True, Recompute(), 64)
    runner: Any = engine._runner
    forward, calls = runner._forward, iter(range(100))

    def failing(host_batch: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return forward(host_batch)

    monkeypatch.setattr(runner, "_forward", failing)
    (first,) = outputs_of(engine, [Request("a", [1, 2, 3], Sampling(0, max_tokens=9))]).values()
    assert first[-1].error == "the step failed: RuntimeError: out of memory" and len(first) == 3
    (second,) = outputs_of(engine, [Request("b", [1, 2, 3], Sampling(0, max_tokens=9))]).values()
    assert second[-1].error is None and len(second) == 9


def test_without_the_option_nothing_is_submitted(model: loading.Model) -> None:
    engine = started(model, False, Recompute(), 64)
    engine.add(Request("a", [1, 2, 3], Sampling(0, max_tokens=3)))
    assert len(engine.step()) == 1
