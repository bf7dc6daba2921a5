"""Beam search over the engine: the answers of a search written down plainly, whatever blocks, schedulers and neighbours do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from beam_reference import HashedRunner, asking, found, hashed, plainly, tokens_of
from engines import engine_on, words
from grids import in_turn

from turnout.core import BlockManager
from turnout.core.types import Finish, Request, Result, Sampling, Step
from turnout.plugins.blocks import PagedBlocks, RadixBlocks
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.preemption import Auto, Recompute, Swap
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.scheduler import FCFS, ChunkedPrefill, Deadline, Fair, PrefixAware, Priority
from turnout.server.engine.beam import ServedEngine
from turnout.server.engine.beam_rule import Search
from turnout.testing import check_balance, make_engine
from turnout.testing.fake import TokenCacheRunner

SIZE = 4  # tokens of a block
ENDS = frozenset(range(0, 64, 4))  # so many that searches end early


def hashing(manager: BlockManager | None = None, *, num_blocks: int = 64, **options: Any) -> ServedEngine:
    """An engine on the hashed model."""
    engine = make_engine(
        options.pop("scheduler", FCFS()),
        num_blocks=num_blocks,
        block_size=SIZE,
        blocks=manager or PagedBlocks(SIZE),
        **options,
    )
    assert isinstance(engine._runner, TokenCacheRunner)
    engine._runner = HashedRunner(num_blocks, SIZE, len(engine._runner.host))
    return ServedEngine(engine)


def assert_empty(beams: ServedEngine) -> None:
    """Nothing of any request is left."""
    check_balance(beams.engine)
    assert not (beams.busy or beams._groups or beams._owners or beams.engine._kept)
    assert beams.engine._blocks.num_free == beams.info.num_blocks


class TestTheRule:
    """By hand, without an engine."""

    def search(self, width: int, **options: Any) -> Search:
        return Search(asking([1], width, **options))

    def test_beams_are_ranked_by_the_sum_of_their_log_probabilities(self) -> None:
        search = self.search(2, max_tokens=9)
        assert search.advance([[(5, -1.0), (6, -2.0)]]) == [0, 0]
        assert search.advance([[(7, -3.0), (8, -4.0)], [(7, -0.5), (9, -4.0)]]) == [1, 0]
        assert [[mark.token for mark in beam.marks] for beam in search.live] == [[6, 7], [5, 7]]
        assert [beam.total for beam in search.live] == [-2.5, -4.0]

    def test_an_ending_counts_only_among_the_width_best(self) -> None:
        search = self.search(2, max_tokens=9, stop_ids=frozenset({0}))
        search.advance([[(5, -1.0), (6, -2.0), (0, -2.5)]])
        assert not search.finished and [beam.total for beam in search.live] == [-1.0, -2.0]
        search.advance([[(0, -0.1), (7, -3.0), (8, -4.0)], [(7, -3.0), (0, -3.5), (8, -4.0)]])
        assert [[mark.token for mark in answer.beam.marks] for answer in search.finished] == [[5, 0]]
        assert [beam.total for beam in search.live] == [-4.0, -5.0]

    def test_a_score_is_the_total_by_the_length_to_the_power_of_the_penalty(self) -> None:
        for penalty in (-1.0, 0.0, 0.5, 2.0):
            search = self.search(1, max_tokens=2, length_penalty=penalty)
            search.advance([[(5, -1.0)]])
            assert search.advance([[(6, -2.0)]]) == []
            assert search.finished[0].score == -3.0 / 2**penalty

    def test_in_the_last_round_the_width_best_are_answers_whether_they_end_or_not(self) -> None:
        search = self.search(2, max_tokens=1, stop_ids=frozenset({0}))
        assert search.advance([[(5, -1.0), (0, -2.0), (6, -3.0)]]) == []
        assert [answer.beam.mark.token for answer in search.finished if answer.beam.mark] == [5, 0]

    def test_it_goes_on_while_the_best_beam_could_still_win(self) -> None:
        def goes_on(early_stopping: bool | str, length_penalty: float) -> bool:
            search = self.search(
                1,
                max_tokens=10,
                stop_ids=frozenset({0}),
                early_stopping=early_stopping,
                length_penalty=length_penalty,
            )
            return search.advance([[(0, -1.0), (5, -2.0)]]) != []

        assert not goes_on(True, 1.0)
        assert not goes_on(False, 1.0), "at its length of now it has the worse score"
        assert goes_on("never", 1.0), "at a length of 10 it could have -0.2"
        assert not goes_on("never", 0.0)

    def test_stop_ids_are_left_out_of_the_first_min_tokens(self) -> None:
        search = self.search(1, max_tokens=9, min_tokens=1, stop_ids=frozenset({0}))
        search.advance([[(0, -0.1), (5, -2.0)]])
        assert not search.finished and search.live[0].total == -2.0
        search.advance([[(0, -0.1), (5, -2.0)]])
        assert search.finished[0].beam.total == -2.1

    def test_of_equals_the_better_beam_and_the_likelier_token_come_first(self) -> None:
        search = self.search(2, max_tokens=9)
        search.advance([[(5, -1.0), (6, -1.0)]])
        assert search.advance([[(7, -1.0), (8, -2.0)], [(3, -1.0), (8, -2.0)]]) == [0, 1]


LENGTHS = [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 13]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_answers_are_those_of_a_search_written_down_plainly(width: int, length: int) -> None:
    for ends, penalty, early in itertools.product((frozenset(), ENDS), (0.0, 1.0, 2.0), (True, False, "never")):
        asked = asking(
            words(length, length),
            width,
            max_tokens=7,
            stop_ids=ends,
            logprobs=3,
            length_penalty=penalty,
            early_stopping=early,
        )
        beams, expected = hashing(), plainly(hashed, asked)
        told = found(beams, asked)
        assert tokens_of(told, asked) == [answer.tokens for answer in expected]
        assert_empty(beams)
        for name, answer in zip(asked.answers, expected, strict=True):
            (output,) = told[name]
            assert output.finish is (Finish.STOP if answer.ends else Finish.LENGTH)
            assert sum(mark.logprob for mark in output.logprobs) == pytest.approx(answer.total)


MANAGERS: dict[str, Callable[[], Any]] = {
    "paged": lambda: PagedBlocks(SIZE),
    "paged without prefix cache": lambda: PagedBlocks(SIZE, prefix_cache=False),
    "radix": lambda: RadixBlocks(SIZE),
    "paged with a host tier": lambda: PagedBlocks(SIZE, host_blocks=6),
}
SCHEDULERS = [FCFS, lambda: ChunkedPrefill(chunk=3, max_prefill_tokens=5), Priority, Fair, Deadline, PrefixAware]
PREEMPTIONS = [Recompute, lambda: Swap(host_blocks=20), lambda: Auto(host_blocks=20)]


@in_turn(manager=MANAGERS.keys(), scheduler=SCHEDULERS * 2, num_blocks=[6, 9, 14, 9, 6])
def test_short_room_few_seats_and_neighbours_change_no_answer(
    manager: str, scheduler: Callable[[], Any], num_blocks: int
) -> None:
    dice = random.Random(f"{manager} {SCHEDULERS.index(scheduler)} {num_blocks}")
    searches = [
        asking(
            words(dice.randrange(1, 14), dice.randrange(99)),
            width,
            name=f"search {width}",
            max_tokens=8,
            stop_ids=dice.choice([ENDS, frozenset()]),
        )
        for width in (4, 2, 1)
    ]
    plain = [Request(f"plain {i}", words(9, 50 + i), Sampling(0, max_tokens=12)) for i in range(3)]
    alone = {r.id: greedy(r.tokens, 12) for r in plain}
    beams = hashing(
        MANAGERS[manager](),
        preemption=dice.choice(PREEMPTIONS)(),
        scheduler=scheduler(),
        num_blocks=num_blocks,
        max_num_seqs=dice.choice([1, 3, 8]),
    )
    told = found(beams, searches[0], plain[0], searches[1], plain[1], searches[2], plain[2])
    for asked in searches:
        assert tokens_of(told, asked) == [answer.tokens for answer in plainly(hashed, asked)]
    for name, tokens in alone.items():
        assert [token for output in told[name] for token in output.tokens] == tokens
    assert_empty(beams)


def greedy(prompt: Sequence[int], num: int, ends: frozenset[int] = frozenset()) -> list[int]:
    made: list[int] = []
    while len(made) < num and not (made and made[-1] in ends):
        values = hashed([*prompt, *made])
        made.append(values.index(max(values)))
    return made


@pytest.mark.parametrize("early_stopping", [True, False])
def test_a_width_of_one_is_greedy(early_stopping: bool) -> None:
    for seed in range(6):
        prompt = words(5 + seed, seed)
        asked = asking(prompt, 1, max_tokens=9, stop_ids=ENDS, early_stopping=early_stopping)
        assert tokens_of(found(hashing(), asked), asked) == [greedy(prompt, 9, ENDS)]


def test_fewer_answers_than_beams_are_the_best_ones() -> None:
    whole, best = (asking(words(6), 4, num, max_tokens=6, stop_ids=ENDS) for num in (4, 2))
    assert tokens_of(found(hashing(), best), best) == tokens_of(found(hashing(), whole), whole)[:2]


class TestWhatIsTold:
    def test_log_probabilities_are_those_of_the_path_with_as_many_others_as_wanted(self) -> None:
        asked = asking(words(6), 3, max_tokens=5, logprobs=2)
        told = found(hashing(), asked)
        for name in asked.answers:
            (output,) = told[name]
            history = words(6)
            for token, mark in zip(output.tokens, output.logprobs, strict=True):
                values = hashed(history)
                order = sorted(range(len(values)), key=lambda i: -values[i])
                assert (mark.token, mark.logprob) == (token, values[token])
                assert mark.rank == order.index(token) + 1
                assert mark.top == tuple((i, values[i]) for i in order[:2])
                history.append(token)

    def test_there_are_none_unless_wanted(self) -> None:
        asked = asking(words(6), 2, max_tokens=5)
        assert all(not output.logprobs for outputs in found(hashing(), asked).values() for output in outputs)

    def test_the_prompt_is_scored_once(self) -> None:
        asked = asking(words(11), 3, max_tokens=3, prompt_logprobs=0)
        told = found(hashing(scheduler=ChunkedPrefill(chunk=4)), asked)
        scores = [mark.token for output in told["abc"] for mark in output.prompt_logprobs]
        assert scores == words(11)[1:]
        assert not any(output.prompt_logprobs for name in asked.answers[1:] for output in told[name])

    def test_without_a_token_to_make_every_answer_is_empty(self) -> None:
        asked, beams = asking(words(6), 3, max_tokens=0, prompt_logprobs=0), hashing()
        told = found(beams, asked)
        assert tokens_of(told, asked) == [[], [], []]
        assert [told[name][-1].finish for name in asked.answers] == [Finish.LENGTH] * 3
        assert_empty(beams)

    def test_an_answer_has_the_times_of_the_whole_search(self) -> None:
        asked, beams = asking(words(6), 2, max_tokens=4), hashing()
        timing = found(beams, asked)["abc"][-1].timing
        assert timing is not None and timing.scheduled is not None and timing.first_token is not None
        assert timing.arrived <= timing.scheduled <= timing.first_token < timing.finished

    def test_the_prompts_cached_tokens_are_the_first_rounds(self) -> None:
        beams, asked = hashing(), asking(words(9), 2, max_tokens=4)
        found(beams, Request("before", words(9), Sampling(0, max_tokens=1)))
        told = found(beams, asked)
        assert {output.num_cached for outputs in told.values() for output in outputs} == {2 * SIZE}

    def test_its_beams_run_from_the_first_step_to_the_last(self) -> None:
        beams = hashing()
        beams.add(asking(words(9), 4, max_tokens=6))
        gauges = []
        while beams.busy:
            beams.step()
            gauges.append((beams.stats.num_running, beams.stats.num_waiting))
        assert gauges == [(4, 0)] * 5 + [(0, 0)]

    def test_prompts_and_hits_are_counted_once(self) -> None:
        beams = hashing()
        found(beams, asking(words(9), 4, max_tokens=6))
        assert (beams.stats.prompt_tokens, beams.stats.cached_tokens) == (9, 0)


class TestWhatPoliciesSee:
    def test_every_beam_has_what_its_search_was_asked_with(self) -> None:
        asked = asking(words(9), 2, max_tokens=4)
        request = asked.request
        request.priority, request.salt, request.arrived = 3, "s", 5.0
        request.labels = {"user": "u", "pin": "true"}
        beams = hashing()
        beams.add(asked)
        seen: dict[str, Request] = {}
        while beams.busy:
            seen |= {one.id: one for one in (*beams.engine.waiting, *beams.engine.running)}
            beams.step()
        assert list(seen) == ["abc", "abc/1.0", "abc/1.1", "abc/2.0", "abc/2.1", "abc/3.0", "abc/3.1"]
        assert {(one.priority, one.salt, one.arrived, one.labels["user"]) for one in seen.values()} == {
            (3, "s", 5.0, "u")
        }
        assert [name for name, one in seen.items() if "pin" in one.labels] == ["abc"], "its prompt is pinned, no beam"
        assert all(one.parent in seen for name, one in seen.items() if name != "abc")


class TestTheEnd:
    @pytest.mark.parametrize("num_blocks", [9, 64])
    def test_aborting_after_any_step_leaves_nothing(self, num_blocks: int) -> None:
        for num_steps in range(12):
            beams = hashing(num_blocks=num_blocks)
            beams.add(asking(words(9), 4, max_tokens=8))
            beams.add(asking(words(7, 1), 2, max_tokens=8, name="other"))
            for _ in range(num_steps):
                beams.step()
            beams.abort("abc")
            beams.abort("other")
            assert_empty(beams)

    def test_aborting_one_search_leaves_the_other_alone(self) -> None:
        beams, asked = hashing(), asking(words(9), 4, max_tokens=8)
        beams.add(asking(words(7, 1), 4, max_tokens=8, name="other"))
        beams.add(asked)
        for _ in range(3):
            beams.step()
        beams.abort("other")
        beams.abort("nobody")
        assert tokens_of(run_out(beams), asked) == [answer.tokens for answer in plainly(hashed, asked)]
        assert_empty(beams)

    def test_a_beam_that_fails_ends_the_search_with_its_error(self) -> None:
        class Failing(HashedRunner):
            def run(self, step: Step) -> Result:
                result = super().run(step)
                failed = {i: "its logits are NaN" for i, c in enumerate(step.chunks) if c.request.id == "abc/2.1"}
                return result._replace(errors=failed)

        beams, asked = hashing(), asking(words(9), 3, max_tokens=8)
        beams.engine._runner = Failing(64, SIZE)
        told = found(beams, asked)
        assert {name: (outputs[-1].finish, outputs[-1].error) for name, outputs in told.items()} == dict.fromkeys(
            asked.answers, (Finish.ERROR, "its logits are NaN")
        )
        assert_empty(beams)

    def test_a_step_that_fails_ends_the_search_once(self) -> None:
        class Failing(HashedRunner):
            def run(self, step: Step) -> Result:
                if any(chunk.request.id == "abc/2.1" for chunk in step.chunks):
                    raise RuntimeError("device lost")
                return super().run(step)

        beams, asked = hashing(), asking(words(9), 3, max_tokens=8)
        beams.engine._runner = Failing(64, SIZE)
        told = found(beams, asked)
        assert set(told) == set(asked.answers) and all(len(outputs) == 1 for outputs in told.values())
        assert all("device lost" in str(outputs[0].error) for outputs in told.values())
        assert_empty(beams)


class TestRefusals:
    def test_what_can_never_fit_is_refused_with_the_numbers(self) -> None:
        beams = hashing(num_blocks=5)
        with pytest.raises(ValueError, match="9 tokens and max_tokens is 13: together 22.* holds 20"):
            beams.add(asking(words(9), 2, max_tokens=13))
        with pytest.raises(
            ValueError, match="a beam width of 990 and 16 stop ids are more than the model's 997 tokens"
        ):
            beams.add(asking(words(9), 990, 1, max_tokens=3, stop_ids=ENDS))
        with pytest.raises(ValueError, match="prompt has token id 5000"):
            beams.add(asking([5000], 2, max_tokens=3))
        assert_empty(beams)

    def test_an_id_is_in_use_until_its_search_is_over(self) -> None:
        beams = hashing()
        beams.add(asking(words(9), 2, max_tokens=8))
        for _ in range(4):
            beams.step()
            for again in (asking(words(9), 2, max_tokens=8), Request("abc", [1])):
                with pytest.raises(ValueError, match="'abc' is already in use"):
                    beams.add(again)
        run_out(beams)
        beams.add(Request("abc", [1]))


def run_out(beams: ServedEngine) -> dict[str, list[Any]]:
    told: dict[str, list[Any]] = {}
    while beams.busy:
        for output in beams.step():
            told.setdefault(output.request_id, []).append(output)
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Model:
    return load(inspect(str(folder), dtype="float32", device="cpu"), Unquantized())


@pytest.fixture(scope="module")
def net(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


STOPS = frozenset(range(3, 128, 5))


class TestOnAModel:
    """A tiny random model in float32, its every token exact."""

    @pytest.mark.parametrize("width", [1, 2, 4])
    @pytest.mark.parametrize("length", [7, 8, 9, 16])
    def test_answers_are_those_of_full_forward_passes(self, tiny: Model, net: Any, width: int, length: int) -> None:
        def after(tokens: Sequence[int]) -> list[float]:
            with torch.inference_mode():
                logits = net(input_ids=torch.tensor([tokens])).logits[0, -1]
            return torch.log_softmax(logits, -1).tolist()  # type: ignore[no-any-return]

        asked = asking(words(length, length, 120), width, max_tokens=6, stop_ids=STOPS)
        expected = [answer.tokens for answer in plainly(after, asked)]
        for num_blocks, prefix_cache, preemption in (
            (40, True, Recompute()),
            (4, False, Swap(8)),
            (4, True, Recompute()),
        ):
            engine = engine_on(
                tiny, num_blocks=num_blocks, block_size=8, prefix_cache=prefix_cache, preemption=preemption
            )
            beams = ServedEngine(engine)
            neighbour = Request("neighbour", words(10, below=120), Sampling(0, max_tokens=9))
            assert tokens_of(found(beams, asked, neighbour), asked) == expected
            assert_empty(beams)

    @pytest.mark.parametrize(
        ("early_stopping", "length_penalty", "width"),
        [(True, 1.0, 2), (False, 1.0, 4), ("never", 1.0, 4), (False, -1.0, 2), ("never", 2.0, 2), (True, 0.0, 4)],
    )
    def test_answers_are_those_of_transformers(
        self, tiny: Model, net: Any, early_stopping: bool | str, length_penalty: float, width: int
    ) -> None:
        num_short = 0
        for seed, (ends, least) in enumerate(((frozenset[int](), 0), (STOPS, 0), (STOPS, 3))):
            prompt = words(5 + 3 * seed, seed, 120)
            ids = torch.tensor([prompt])
            said = net.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=8,
                min_new_tokens=least or None,
                eos_token_id=sorted(ends) or None,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                do_sample=False,
                pad_token_id=1,
            )
            asked = asking(
                prompt,
                width,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                max_tokens=8,
                min_tokens=least,
                stop_ids=ends,
            )
            told = tokens_of(found(ServedEngine(engine_on(tiny, block_size=4)), asked), asked)
            padded = [tokens + [1] * (said.shape[1] - len(prompt) - len(tokens)) for tokens in told]
            assert padded == said[:, len(prompt) :].tolist()
            num_short += sum(len(tokens) < 8 for tokens in told)
        assert num_short or length_penalty > 1, "no answer ended early: this would prove little"


class TestSharing:
    """What a beam costs beside a plain request."""

    def test_a_round_computes_a_token_a_beam_and_the_prompt_once(self) -> None:
        beams = hashing(num_blocks=200, max_num_batched_tokens=1000)
        found(beams, asking(words(102), 4, max_tokens=9))
        steps = beams.engine._runner.steps  # type: ignore[attr-defined]
        assert [step.num_tokens for step in steps] == [102, *[4] * 8]

    def test_every_full_block_is_shared_and_only_the_part_full_one_is_copied(self) -> None:
        width, prompt = 4, words(102)  # 25 full blocks, and 2 tokens in another
        beams = hashing(num_blocks=200, max_num_batched_tokens=1000)
        beams.add(asking(prompt, width, max_tokens=9))
        most = 0
        while beams.busy:
            beams.step()
            most = max(most, 200 - beams.engine._blocks.num_free)
            check_balance(beams.engine)
        own = 1 + -(-9 // SIZE)  # blocks a beam may have for itself: behind the 25 there are 11 tokens
        assert most <= 25 + 2 * width * own, "two rounds at once, at most"
        alone = width * -(-(102 + 9) // SIZE)
        assert most < alone / 2

    def test_no_block_is_copied_twice_for_a_beam(self) -> None:
        beams = hashing(num_blocks=200, max_num_batched_tokens=1000)
        found(beams, asking(words(102), 4, max_tokens=9))
        steps = beams.engine._runner.steps  # type: ignore[attr-defined]
        assert all(len(step.copies) <= 4 for step in steps)
        assert sum(len(step.copies) for step in steps) > 0
