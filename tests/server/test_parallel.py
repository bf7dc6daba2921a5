"""Parallel sampling, several answers to one prompt: one computes it, the others fork its blocks; what becomes of them when it goes away."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
from engines import engine_on, outputs_of, words

from turnout.core import Request, Sampling
from turnout.core.engine import Engine
from turnout.core.types import Finish, Result, Step
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.server.engine.messages import ParallelSampling
from turnout.server.engine.parallel import requests_of
from turnout.testing import check_balance, continuation, make_engine
from turnout.testing.fake import TokenCacheRunner

SIZE = 4  # tokens of a block
PROMPT = words(102)  # 25 full blocks and 2 tokens
NUM = 4


def engine(**options: Any) -> Engine:
    """An engine on the fake model, with room for everything unless told."""
    manager = PagedBlocks(SIZE, prefix_cache=options.pop("prefix_cache", True))
    limits = {"num_blocks": 300, "max_num_batched_tokens": 1000} | options
    return make_engine(limits.pop("scheduler", FCFS()), block_size=SIZE, blocks=manager, **limits)


def asked(num: int = NUM, prompt: list[int] = PROMPT, **sampling: Any) -> list[Request]:
    return parallel(num, prompt, Sampling(**({"temperature": 0, "max_tokens": 10} | sampling)))


def parallel(num: int, prompt: list[int], sampling: Sampling, **options: Any) -> list[Request]:
    names = tuple(f"a-{place}" for place in range(num))
    return list(requests_of(ParallelSampling(Request("a-0", list(prompt), sampling, **options), names)))


def run_out(engine: Engine) -> dict[str, list[int]]:
    told: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            told.setdefault(output.request_id, []).extend(output.tokens)
        check_balance(engine)
    return told


def steps_of(engine: Engine) -> list[int]:
    """How many tokens each step computed."""
    assert isinstance(engine._runner, TokenCacheRunner)
    return [step.num_tokens for step in engine._runner.steps]


class TestRequests:
    def test_the_first_scores_the_prompt_and_each_has_its_own_seed(self) -> None:
        made = parallel(3, [1, 2], Sampling(seed=7, prompt_logprobs=2, logprobs=1))
        assert [r.id for r in made] == ["a-0", "a-1", "a-2"]
        assert [r.parent for r in made] == [None, "a-0", "a-0"]
        assert [r.sampling.seed for r in made] == [7, 8, 9]
        assert [r.sampling.prompt_logprobs for r in made] == [2, None, None]
        assert [r.sampling.logprobs for r in made] == [1, 1, 1]

    def test_a_seed_stays_within_64_bits(self) -> None:
        assert [r.sampling.seed for r in parallel(2, [1], Sampling(seed=2**64 - 1))] == [2**64 - 1, 0]

    def test_prompts_are_copies(self) -> None:
        first, second = parallel(2, [1, 2], Sampling())
        assert first.tokens is not second.tokens

    def test_the_prompt_travels_once_however_many_answers_are_asked_for(self) -> None:
        request = Request("a", list(range(1000, 50_000)), Sampling())
        one, many = (
            len(pickle.dumps(ParallelSampling(request, tuple(f"a-{i}" for i in range(num))))) for num in (1, 128)
        )
        assert many - one < 128 * 16

    def test_all_carry_what_schedulers_read(self) -> None:
        made = parallel(2, [1], Sampling(), priority=3, labels={"user": "u"}, salt="s")
        assert [(r.priority, r.labels, r.salt) for r in made] == [(3, {"user": "u"}, "s")] * 2


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
class TestSharing:
    def test_the_prompt_is_computed_once(self, prefix_cache: bool) -> None:
        one = engine(prefix_cache=prefix_cache)
        for request in asked():
            one.add(request)
        assert run_out(one) == {f"a-{i}": continuation(PROMPT, 10) for i in range(NUM)}
        # the prompt; its first decode with the prompt's last token for each child; decodes; the children's last
        assert steps_of(one) == [102, 1 + 3, *[4] * 8, 3]
        assert (one.stats.prompt_tokens, one.stats.cached_tokens) == (102, 0)

    def test_full_blocks_are_shared_and_part_full_ones_copied(self, prefix_cache: bool) -> None:
        one = engine(prefix_cache=prefix_cache)
        most, copies = 0, 0
        for request in asked():
            one.add(request)
        while one.busy:
            one.step()
            most = max(most, 300 - one._blocks.num_free)
        copies = sum(len(step.copies) for step in one._runner.steps)  # type: ignore[attr-defined]
        alone = -(-(102 + 9) // SIZE)  # the last token needs no room
        assert most <= 25 + NUM * (alone - 25) and most < NUM * alone / 2
        assert copies == NUM - 1, "one part-full block for each that comes to write into it"

    def test_a_prompt_that_fills_its_blocks_needs_no_copy_but_for_its_last_token(self, prefix_cache: bool) -> None:
        one = engine(prefix_cache=prefix_cache)
        for request in asked(prompt=words(100)):
            one.add(request)
        run_out(one)
        assert steps_of(one)[:2] == [100, 1 + 3]


def test_no_answer_comes_before_the_first_one_has_all_of_the_prompts_log_probabilities() -> None:
    one = engine(scheduler=ChunkedPrefill(chunk=40, max_prefill_tokens=40), max_num_batched_tokens=64)
    for request in asked(prompt_logprobs=0):
        one.add(request)
    outputs = [output for _ in range(30) for output in one.step()]
    scored = [output for output in outputs if output.prompt_logprobs]
    assert {output.request_id for output in scored} == {"a-0"}
    assert sum(len(output.prompt_logprobs) for output in scored) == len(PROMPT) - 1
    assert outputs.index(scored[-1]) < min(outputs.index(o) for o in outputs if o.request_id != "a-0")


def test_a_long_prompt_in_chunks_is_forked_when_it_is_computed() -> None:
    one = engine(scheduler=ChunkedPrefill(chunk=40, max_prefill_tokens=40), max_num_batched_tokens=64)
    for request in asked():
        one.add(request)
    assert run_out(one) == {f"a-{i}": continuation(PROMPT, 10) for i in range(NUM)}
    assert steps_of(one)[:4] == [40, 40, 22, 1 + 3]


@pytest.mark.parametrize("preemption", [Recompute, lambda: Swap(host_blocks=20)], ids=["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [8, 10, 14])
def test_short_room_changes_no_answer(preemption: Callable[[], Any], num_blocks: int) -> None:
    prompt = words(17)
    one = engine(num_blocks=num_blocks, preemption=preemption())
    for request in (*asked(prompt=prompt), Request("other", words(9, 3), Sampling(0, max_tokens=12))):
        one.add(request)
    told = run_out(one)
    assert [told[f"a-{i}"] for i in range(NUM)] == [continuation(prompt, 10)] * NUM
    assert told["other"] == continuation(words(9, 3), 12)


class TestWithoutTheFirst:
    """The others have their answers whatever becomes of the first."""

    @pytest.mark.parametrize("num_steps", range(5))
    def test_aborting_it_at_any_moment(self, num_steps: int) -> None:
        one = engine(scheduler=ChunkedPrefill(chunk=40, max_prefill_tokens=40))
        for request in asked():
            one.add(request)
        for _ in range(num_steps):
            one.step()
        one.abort("a-0")
        told = run_out(one)
        assert {name: told[name][-2:] for name in ("a-1", "a-2", "a-3")} == dict.fromkeys(
            ("a-1", "a-2", "a-3"), continuation(PROMPT, 10)[-2:]
        )
        assert one._blocks.num_free == 300

    def test_one_that_is_refused(self) -> None:
        one = engine(num_blocks=10)
        for request in asked():
            with pytest.raises(ValueError, match="holds 40"):
                one.add(request)
        assert not one.busy

    def test_one_that_fails(self) -> None:
        class Failing(TokenCacheRunner):
            def run(self, step: Step) -> Result:
                result = super().run(step)
                return result._replace(errors={0: "NaN"}) if step.chunks[0].request.id == "a-0" else result

        one = engine()
        one._runner = Failing(300, SIZE)
        for request in asked():
            one.add(request)
        told = run_out(one)
        assert {name: told[name] for name in ("a-1", "a-2", "a-3")} == dict.fromkeys(
            ("a-1", "a-2", "a-3"), continuation(PROMPT, 10)
        )

    @pytest.mark.parametrize("num_tokens", [0, 1, 2])
    def test_one_that_is_done_at_once(self, num_tokens: int) -> None:
        one = engine()
        for request in asked(max_tokens=num_tokens):
            one.add(request)
        assert run_out(one) == {f"a-{i}": continuation(PROMPT, num_tokens) for i in range(NUM)}
        assert sum(steps_of(one)) < 2 * len(PROMPT), "what it left in the prefix cache is found"

    def test_a_stop_token_ends_only_the_one_that_made_it(self) -> None:
        ends = continuation(PROMPT, 3)[2]
        requests = asked()
        requests[0].sampling = Sampling(0, max_tokens=10, stop_ids=frozenset({ends}))
        one = engine()
        for request in requests:
            one.add(request)
        told = run_out(one)
        assert told["a-0"] == continuation(PROMPT, 3)
        assert [told[f"a-{i}"] for i in (1, 2, 3)] == [continuation(PROMPT, 10)] * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = models.save("llama", tmp_path_factory.mktemp("llama"))
    return load(inspect(str(folder), dtype="float32", device="cpu"), Unquantized())


@pytest.mark.parametrize("length", [7, 8, 9, 30])
def test_sampled_answers_are_those_of_each_seed_alone(tiny: Model, length: int) -> None:
    prompt = words(length, length, 120)
    requests = parallel(NUM, prompt, Sampling(seed=5, max_tokens=8))
    alone = []
    for request in requests:
        single = Request("alone", list(prompt), request.sampling)
        alone.append([t for o in outputs_of(engine_on(tiny, block_size=8), [single])["alone"] for t in o.tokens])
    told = outputs_of(engine_on(tiny, block_size=8), requests)
    assert [[t for o in told[r.id] for t in o.tokens] for r in requests] == alone
    assert len({tuple(tokens) for tokens in alone}) > 1
    assert all(outputs[-1].finish is Finish.LENGTH for outputs in told.values())
