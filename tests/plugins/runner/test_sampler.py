"""How logits become tokens and log-probabilities."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from grids import every
from torch import Tensor

from turnout.core.engine import _check_ids
from turnout.core.types import Request, Sampling
from turnout.plugins.runner import rows
from turnout.plugins.runner.sampler import sample, score, uniform


def request(id: str = "r", tokens: Sequence[int] = (0,), generated: Sequence[int] = (), **sampling: Any) -> Request:
    made = Request(id, list(tokens), Sampling(**{"max_tokens": 1000, **sampling}))
    made.tokens += generated
    return made


def tokens_of(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    tokens, _, errors = sample(logits, requests)
    assert not errors
    return tokens


def random_logits(num_rows: int, vocab_size: int = 300, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def reference(logits: Tensor, s: Sampling, number: float) -> int:
    """The sampler as its docstring states it, in float64."""
    p = torch.softmax(logits.double() / s.temperature, -1).numpy()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))[: s.top_k or None]
    if s.top_p < 1.0:
        mass = np.cumsum(p[order] / p[order].sum())
        order = [token for token, reached in zip(order, [0.0, *mass], strict=False) if reached < s.top_p]
    order = [token for token in order if p[token] >= s.min_p * p[order[0]]]
    kept = sorted(order)
    return kept[int(np.searchsorted(np.cumsum(p[kept] / p[kept].sum()), number, side="right"))]


GRID = list(
    itertools.product([0.3, 0.8, 1.0, 3.0], [0, 1, 5, 20, 1000], [0.1, 0.5, 0.9, 0.99, 1.0], [0.0, 0.05, 0.3, 1.0])
)


@pytest.mark.parametrize("on_host", [True, False], ids=["numpy", "torch"])
def test_every_combination_of_filters_agrees_with_a_ten_line_reference(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_on_host", lambda x: on_host)
    requests = [
        request(temperature=t, top_k=k, top_p=p, min_p=m, seed=seed) for seed, (t, k, p, m) in enumerate(GRID * 6)
    ]
    logits = random_logits(len(requests))
    expected = [reference(row, r.sampling, uniform(r)) for row, r in zip(logits, requests, strict=True)]
    assert tokens_of(logits, requests) == expected


def test_the_filters_agree_with_the_reference_where_many_tokens_are_equally_likely() -> None:
    requests = [request(temperature=t, top_k=k, top_p=p, min_p=m, seed=s) for s, (t, k, p, m) in enumerate(GRID)]
    logits = random_logits(len(requests), 64).mul(2).round().div(2)
    expected = [reference(row, r.sampling, uniform(r)) for row, r in zip(logits, requests, strict=True)]
    assert tokens_of(logits, requests) == expected


@every("top_p", [0.01, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_top_k_1_gives_the_best_token_whatever_the_other_filters(top_p: float, temperature: float) -> None:
    logits = random_logits(20)
    requests = [request(temperature=temperature, top_k=1, top_p=top_p, min_p=0.9, seed=s) for s in range(20)]
    assert tokens_of(logits, requests) == logits.argmax(-1).tolist()


def test_of_equal_logits_top_k_keeps_the_lowest_ids() -> None:
    logits = torch.zeros(400, 50)
    drawn = tokens_of(logits, [request(top_k=3, seed=s) for s in range(400)])
    assert set(drawn) == {0, 1, 2}


def test_top_p_is_measured_after_temperature_and_after_top_k() -> None:
    logits = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]).log().repeat(300, 1)

    def kept(**filters: float) -> set[int]:
        return set(tokens_of(logits, [request(seed=s, **filters) for s in range(300)]))

    assert kept(top_p=0.75) == {0, 1}
    assert kept(top_p=0.85) == {0, 1, 2}
    assert kept(top_p=0.85, top_k=3) == {0, 1}  # 0.8 of 0.9
    assert kept(top_p=0.55, temperature=0.5) == {0}  # 0.25 of 0.3652
    assert kept(min_p=0.15) == {0, 1, 2}
    assert kept(min_p=0.15, temperature=0.5) == {0, 1}


def test_a_nearly_flat_row_of_a_large_vocabulary_keeps_what_top_p_asks_for() -> None:
    logits = random_logits(1, 2000, scale=0.5).repeat(300, 1)
    logits[:, 7] = 11.0  # so high that all others lie under the first guess of what matters
    requests = [request(top_p=0.999, seed=s) for s in range(300)]
    expected = [reference(logits[0], r.sampling, uniform(r)) for r in requests]
    assert len(set(expected)) > 3
    assert tokens_of(logits, requests) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_tiny_temperature_is_greedy_and_the_lowest_id_wins_a_tie(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 1000, dtype=dtype)
    logits[0, [900, 31]] = 3.0
    logits[1, 999] = 1e-3
    logits[2] = -5.0
    logits[3, 0] = -1.0
    for temperature in (0.0, 1e-40, 5e-324, 1e-10, 1e-8, 1e-5):
        assert tokens_of(logits, [request(temperature=temperature) for _ in range(4)]) == [31, 999, 0, 1]


def test_a_small_temperature_gives_the_best_token_and_no_error() -> None:
    logits = random_logits(10)
    assert tokens_of(logits, [request(temperature=2e-5, seed=s) for s in range(10)]) == logits.argmax(-1).tolist()


def test_masked_logits_are_never_drawn() -> None:
    for low in (-math.inf, torch.finfo(torch.float32).min):
        logits = torch.full((200, 300), low)
        logits[:, [5, 299]] = 1.0
        for filters in ({}, {"top_p": 0.9999}, {"top_k": 50}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.9}):
            drawn = tokens_of(logits, [request(temperature=0.7, seed=s, **filters) for s in range(200)])
            assert set(drawn) == {5, 299}


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    num_draws = 20_000
    for temperature, expected in ((1.0, [0.5, 0.25, 0.125, 0.125]), (0.5, [8 / 11, 2 / 11, 0.5 / 11, 0.5 / 11])):
        requests = [request(generated=range(i % 100), seed=i // 100, temperature=temperature) for i in range(num_draws)]
        counts = Counter(tokens_of(logits.repeat(num_draws, 1), requests))
        for token, p in enumerate(expected):
            assert abs(counts[token] / num_draws - p) < 4 * math.sqrt(p * (1 - p) / num_draws)


def test_the_numbers_are_evenly_spread_over_seeds_and_over_positions() -> None:
    by_seed = [uniform(request(seed=seed)) for seed in range(5000)]
    by_position = [uniform(request(seed=0, generated=[0] * k)) for k in range(2000)]
    for numbers in (by_seed, by_position):
        assert 0.0 <= min(numbers) and max(numbers) < 1.0
        counts, _ = np.histogram(numbers, bins=20, range=(0.0, 1.0))
        expected = len(numbers) / 20
        assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-squared, 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / math.sqrt(len(numbers))


def test_a_seed_gives_the_same_token_whatever_the_neighbours() -> None:
    logits = random_logits(9, 1000)
    mine = request("mine", generated=[4, 5], seed=7, top_p=0.95)
    others = [
        request("a", temperature=0.0),
        request("b"),
        request("c", seed=7),
        request("d", seed=8, top_k=40),
        request("e", temperature=0.0, logprobs=3),
        request("f", presence_penalty=1.0, generated=[3]),
        request("g", temperature=100.0, top_p=0.99),
        request("h", min_p=0.1),
    ]
    alone = tokens_of(logits[:1], [mine])
    for size in range(len(others) + 1):
        for place in (0, size):
            order = list(range(1, size + 1))
            order.insert(place, 0)
            batch = [[mine, *others][row] for row in order]
            assert tokens_of(logits[order], batch)[place : place + 1] == alone


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 30, "min_p": 0.01}])
def test_each_row_of_a_batch_is_what_it_is_alone(filters: dict[str, Any]) -> None:
    logits = random_logits(64, 3001)
    requests = [request(str(i), seed=i, temperature=1.3, **filters) for i in range(64)]
    alone = [tokens_of(logits[i : i + 1], [requests[i]])[0] for i in range(64)]
    assert tokens_of(logits, requests) == alone
    backwards = list(range(63, -1, -1))
    assert tokens_of(logits[backwards], [requests[i] for i in backwards]) == alone[::-1]


def test_a_seeded_request_repeats_itself_and_its_numbers_depend_on_nothing_but_seed_and_length() -> None:
    first = [uniform(request("a", seed=3, generated=[1] * k)) for k in range(50)]
    again = [uniform(request("b", tokens=[9, 9, 9], seed=3, generated=[2] * k)) for k in range(50)]
    assert first == again
    assert len(set(first)) == 50
    assert first != [uniform(request("a", seed=4, generated=[1] * k)) for k in range(50)]


def test_without_a_seed_each_request_has_numbers_of_its_own_that_stay() -> None:
    one, other = request("one"), request("other")
    assert uniform(one) == uniform(one) != uniform(other)
    assert uniform(replace_arrived(one, 1.0)) != uniform(replace_arrived(one, 2.0))  # an id may be used again


def replace_arrived(made: Request, arrived: float) -> Request:
    return Request(made.id, list(made.tokens), made.sampling, arrived=arrived)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1])
def test_every_64_bit_seed_works(seed: int) -> None:
    assert 0.0 <= uniform(request(seed=seed)) < 1.0


def test_repetition_penalty_counts_prompt_and_output_presence_and_frequency_output_only() -> None:
    """Token 0 is in the prompt, 1 was generated twice; greedy shows which logit is the highest."""
    start = {"tokens": [0, 0, 0, 0], "generated": [1, 1], "temperature": 0.0}

    def winner(logits: list[float], **penalty: float) -> int:
        return tokens_of(torch.tensor([logits]), [request(**start, **penalty)])[0]

    assert winner([4.0, 3.0, 2.5], repetition_penalty=1.5) == 0  # 2.67, 2, 2.5
    assert winner([4.0, 3.0, 2.7], repetition_penalty=1.5) == 2
    assert winner([-1.0, -2.0, -1.4], repetition_penalty=1.5) == 2  # -1.5, -3, -1.4
    assert winner([-1.0, -2.0, -1.6], repetition_penalty=1.5) == 0
    assert winner([4.0, 5.9, 0.0], presence_penalty=2.0) == 0  # 4, 3.9, 0
    assert winner([4.0, 6.1, 0.0], presence_penalty=2.0) == 1
    assert winner([4.0, 7.9, 0.0], frequency_penalty=2.0) == 0  # 4, 3.9, 0
    assert winner([4.0, 8.1, 0.0], frequency_penalty=2.0) == 1
    assert winner([4.0, 9.9, 0.0], frequency_penalty=2.0, presence_penalty=2.0) == 0
    assert winner([4.0, 10.1, 0.0], frequency_penalty=2.0, presence_penalty=2.0) == 1
    assert winner([-4.0, -3.9, -9.0], frequency_penalty=-1.0) == 1
    assert winner([4.0, 9.0, 0.0], frequency_penalty=2.0, repetition_penalty=2.0) == 0  # 2, 0.5, 0


def test_the_first_token_sees_no_presence_or_frequency_penalty() -> None:
    logits = torch.tensor([[5.0, 4.9]])
    assert tokens_of(
        logits, [request(tokens=[0] * 4, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)]
    ) == [0]
    assert tokens_of(logits, [request(tokens=[0] * 4, temperature=0.0, repetition_penalty=1.5)]) == [1]


def test_logit_bias_bans_and_forces_alone_and_in_a_batch() -> None:
    logits = random_logits(6)
    best, second = logits.topk(2).indices.T.tolist()
    plain = request(temperature=0.0)
    banned = [request(temperature=0.0, logit_bias={best[i]: -100.0}) for i in range(6)]
    assert tokens_of(logits, banned) == second
    assert tokens_of(logits[:1], banned[:1]) == second[:1]
    mixed = [plain, banned[1], plain, request(logit_bias={77: 100.0}, seed=1), banned[4], plain]
    assert tokens_of(logits, mixed) == [best[0], second[1], best[2], 77, second[4], best[5]]
    drawn = tokens_of(logits[:1].repeat(500, 1), [request(logit_bias={best[0]: -100}, seed=s) for s in range(500)])
    assert best[0] not in drawn


def test_bias_and_penalties_add_up_on_the_same_token() -> None:
    logits = torch.tensor([[10.0, 0.0]])
    ask = {"generated": [0, 0], "temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    assert tokens_of(logits, [request(**ask, logit_bias={0: -3.9})]) == [0]
    assert tokens_of(logits, [request(**ask, logit_bias={0: -4.1})]) == [1]


def test_stop_ids_are_impossible_until_min_tokens_exist() -> None:
    logits = torch.tensor([[1.0, 9.0, 8.0, 0.5]])
    for num_generated, expected in ((0, 0), (2, 0), (3, 1), (4, 1)):
        asked = request(generated=[3] * num_generated, temperature=0.0, min_tokens=3, stop_ids=frozenset({1, 2}))
        assert tokens_of(logits, [asked]) == [expected]
    drawn = tokens_of(
        logits.repeat(200, 1), [request(seed=s, min_tokens=3, stop_ids=frozenset({1, 2})) for s in range(200)]
    )
    assert set(drawn) == {0, 3}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.9, "logprobs": 2}])
def test_a_row_without_a_usable_logit_fails_alone(sampling: dict[str, Any]) -> None:
    logits = random_logits(6)
    clean = tokens_of(logits, [request(str(i), **sampling) for i in range(6)])
    logits[1, 17] = math.nan
    logits[2] = math.nan
    logits[4] = -math.inf
    logits[5, 3] = math.inf
    tokens, logprobs, errors = sample(logits, [request(str(i), **sampling) for i in range(6)])
    assert tokens == [clean[0], 0, 0, clean[3], 0, 0]
    assert sorted(errors) == [1, 2, 4, 5]
    assert all(message.startswith("the model produced NaN logits") for message in errors.values())
    assert sorted(logprobs) == ([0, 3] if "logprobs" in sampling else [])


def test_a_ban_does_not_hide_that_the_model_produced_nan() -> None:
    logits = random_logits(1, 10)
    logits[0, 3] = math.nan
    _, _, errors = sample(logits, [request(temperature=0.0, min_tokens=2, stop_ids=frozenset({3}))])
    assert list(errors) == [0]


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 100), []) == ([], {}, {})
    assert score(torch.empty(0, 100), [], 3) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_stay_as_they_were(dtype: torch.dtype) -> None:
    logits = random_logits(3).to(dtype)
    before = logits.clone()
    asked = request(seed=1, generated=[1], top_p=0.9, presence_penalty=1.0, repetition_penalty=1.3, logprobs=2)
    sample(logits, [asked] * 3)
    assert torch.equal(logits, before)


def test_logprobs_describe_the_raw_distribution_whatever_is_done_to_it() -> None:
    logits = random_logits(1)
    raw = torch.log_softmax(logits[0], -1)
    asks: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 5},
        {"temperature": 2.0, "top_p": 0.5},
        {"temperature": 0.0, "logit_bias": {7: 100.0}},
        {"temperature": 0.0, "repetition_penalty": 2.0, "tokens": [int(raw.argmax())]},
        {"temperature": 0.0, "min_tokens": 1, "stop_ids": frozenset({int(raw.argmax())})},
    ]
    for ask in asks:
        (token,), logprobs, _ = sample(logits, [request(logprobs=4, seed=3, **ask)])
        found = logprobs[0]
        assert found.token == token
        assert found.logprob == pytest.approx(float(raw[token]), abs=1e-6)
        assert found.rank == 1 + int((raw > raw[token]).sum())
        assert [t for t, _ in found.top] == raw.topk(4).indices.tolist()
        assert [v for _, v in found.top] == pytest.approx(raw.topk(4).values.tolist(), abs=1e-6)


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    logits = random_logits(4, 10)
    asked = [request(temperature=0.0, logprobs=n) for n in (0, None, 3, 10)]
    tokens, logprobs, _ = sample(logits, asked)
    assert sorted(logprobs) == [0, 2, 3]
    assert [len(logprobs[row].top) for row in (0, 2, 3)] == [0, 3, 10]
    assert tokens == logits.argmax(-1).tolist()
    assert logprobs[0].logprob == pytest.approx(float(torch.log_softmax(logits[0], -1).max()), abs=1e-6)


def test_equally_likely_alternatives_come_lowest_id_first_and_share_a_rank() -> None:
    logits = torch.zeros(1, 20)
    logits[0, 11] = 1.0
    _, logprobs, _ = sample(logits, [request(temperature=0.0, logprobs=4, logit_bias={15: 9.0})])
    assert [token for token, _ in logprobs[0].top] == [11, 0, 1, 2]
    assert (logprobs[0].token, logprobs[0].rank) == (15, 2)


def test_impossible_tokens_have_finite_logprobs() -> None:
    logits = torch.full((1, 8), -math.inf)
    logits[0, 2] = 0.0
    _, logprobs, _ = sample(logits, [request(temperature=0.0, logprobs=3)])
    assert logprobs[0].top == ((2, 0.0), (0, -9999.0), (1, -9999.0))
    (scored,) = score(logits, [5], 1)
    assert (scored.logprob, scored.rank, scored.top) == (-9999.0, 2, ((2, 0.0),))


@pytest.mark.parametrize("on_host", [True, False], ids=["numpy", "torch"])
@pytest.mark.parametrize("num_rows", [1, 128, 300])
def test_a_prompt_is_scored_token_by_token(num_rows: int, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_on_host", lambda x: on_host)
    logits = random_logits(num_rows, 50)
    tokens = [(7 * i) % 50 for i in range(num_rows)]
    raw = torch.log_softmax(logits, -1)
    scored = score(logits, tokens, 2)
    assert [s.token for s in scored] == tokens
    assert [s.logprob for s in scored] == pytest.approx([float(raw[i, t]) for i, t in enumerate(tokens)], abs=1e-6)
    assert [s.rank for s in scored] == [1 + int((raw[i] > raw[i, t]).sum()) for i, t in enumerate(tokens)]
    assert [[t for t, _ in s.top] for s in scored] == raw.topk(2).indices.tolist()


def test_scores_of_nan_logits_are_finite() -> None:
    logits = random_logits(2, 10)
    logits[1, 4] = math.nan
    good, bad = score(logits, [1, 1], 2)
    assert good == score(logits[:1], [1], 2)[0]
    assert bad.logprob == -9999.0 and len(bad.top) == 2


def test_only_requests_that_ask_for_something_leave_the_fast_path() -> None:
    assert Sampling(temperature=0.0).plain
    assert Sampling(temperature=1e-6, top_p=0.5, top_k=3, seed=1, stop_ids=frozenset({2}), prompt_logprobs=1).plain
    slow: list[dict[str, Any]] = [
        {"temperature": 0.5},
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 1, "stop_ids": frozenset({2})},
    ]
    for one in slow:
        assert not Sampling(**{"temperature": 0.0, **one}).plain
    assert replace(Sampling(), temperature=0.0).plain


@every(
    ("made", "field"),
    [
        (request(tokens=[1, 100]), "prompt"),
        (request(tokens=[-1]), "prompt"),
        (request(tokens=[2**63]), "prompt"),
        (request(logit_bias={100: 1.0}), "logit_bias"),
        (request(logit_bias={5: 1.0, -1: 1.0}), "logit_bias"),
        (request(logit_bias={10**12: -100.0}), "logit_bias"),
        (request(stop_ids=frozenset({3, 100})), "stop_ids"),
        (request(forced=(3, 100)), "forced"),
        (request(logprobs=101), "logprobs"),
        (request(prompt_logprobs=101), "prompt_logprobs"),
    ],
)
def test_what_lies_outside_the_vocabulary_is_refused_by_name(made: Request, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} "):
        _check_ids(made, 100)


def test_the_whole_vocabulary_is_accepted() -> None:
    _check_ids(
        request(
            tokens=[0, 99], logit_bias={0: 1.0, 99: 1.0}, stop_ids=frozenset({0, 99}), logprobs=100, prompt_logprobs=100
        ),
        100,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_taken_whatever_the_logits_say_and_reported_like_others(temperature: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    asked = [
        request("a", generated=[9], temperature=temperature, seed=1, forced=(9, 17, 3), logprobs=2, max_tokens=9),
        request("b", temperature=temperature, seed=2, max_tokens=9),
        request("c", generated=[5], temperature=temperature, seed=3, forced=(5,), max_tokens=9),
    ]
    tokens, logprobs, errors = sample(logits, asked)
    free, _, _ = sample(logits, [replace_forced(r) for r in asked])
    assert tokens == [17, *free[1:]] and not errors
    assert logprobs[0].token == 17
    assert logprobs[0].logprob == pytest.approx(torch.log_softmax(logits[0], -1)[17].item(), abs=1e-6)


def test_a_forced_token_does_not_hide_broken_logits() -> None:
    _, _, errors = sample(torch.full((1, 50), torch.nan), [request(forced=(17,), max_tokens=9)])
    assert 0 in errors


def replace_forced(made: Request) -> Request:
    """The same request, free to choose."""
    free = Request(made.id, list(made.tokens), replace(made.sampling, forced=()), made.arrived)
    free.num_prompt = made.num_prompt
    return free
