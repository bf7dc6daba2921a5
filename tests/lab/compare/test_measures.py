"""What is measured on one token, and how a table of tokens is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.lab.compare.measures import Difference, Mark, Table, difference, summarize


def mark(probabilities: dict[int, float], token: int = 0, num_top: int = 3) -> Mark:
    """What a side with these probabilities says of `token`."""
    ordered = sorted(probabilities.items(), key=lambda pair: -pair[1])
    return Mark(token, math.log(probabilities[token]), tuple((t, math.log(p)) for t, p in ordered[:num_top]))


def test_the_same_distribution_differs_in_nothing() -> None:
    same = mark({0: 0.5, 1: 0.3, 2: 0.2})
    assert difference(same, same) == Difference(False, 0.0, pytest.approx(0.0, abs=1e-12), 0.0, 1.0)


def test_a_flip_has_the_margin_by_which_the_first_side_held_its_own_token() -> None:
    found = difference(mark({0: 0.5, 1: 0.3, 2: 0.2}), mark({0: 0.3, 1: 0.5, 2: 0.2}))
    assert found.flip and found.margin == pytest.approx(math.log(0.5 / 0.3))
    assert found.gap == pytest.approx(math.log(0.5 / 0.3))


def test_a_token_the_first_side_does_not_list_is_at_least_as_far_as_the_last_it_lists() -> None:
    found = difference(mark({0: 0.6, 1: 0.3, 2: 0.06, 3: 0.04}), mark({3: 0.9, 0: 0.05, 1: 0.03, 2: 0.02}))
    assert found.flip and found.margin == pytest.approx(math.log(0.6 / 0.06))


def test_divergence_is_exact_when_both_list_every_token() -> None:
    p, q = {0: 0.5, 1: 0.3, 2: 0.2}, {0: 0.2, 1: 0.3, 2: 0.5}
    assert difference(mark(p), mark(q)).kl == pytest.approx(sum(p[t] * math.log(p[t] / q[t]) for t in p))


weights = st.lists(st.floats(1e-6, 1.0), min_size=8, max_size=8)


@given(weights, weights, st.integers(1, 8), st.integers(1, 8))
def test_what_is_seen_of_a_divergence_is_never_negative_and_never_too_much(
    a: list[float], b: list[float], num_a: int, num_b: int
) -> None:
    p = {i: w / sum(a) for i, w in enumerate(a)}
    q = {i: w / sum(b) for i, w in enumerate(b)}
    full = sum(p[t] * math.log(p[t] / q[t]) for t in p)
    assert -1e-9 <= difference(mark(p, 0, num_a), mark(q, 0, num_b)).kl <= full + 1e-9


def test_marks_of_different_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="different tokens"):
        difference(mark({0: 0.5, 1: 0.5}, 0), mark({0: 0.5, 1: 0.5}, 1))


SAME = Difference(False, 0.0, 0.0, 0.0, 1.0)


def test_what_is_no_number_is_refused_and_two_impossible_tokens_are_alike() -> None:
    with pytest.raises(ValueError, match="not a number"):
        difference(mark({0: 0.5, 1: 0.5}), Mark(0, math.nan, ((0, math.nan),)))
    never = Mark(3, -math.inf, ((0, 0.0),))
    assert difference(never, never).gap == 0.0


def table() -> Table:
    rows = [
        (0, 10, False, Difference(False, 0.0, 0.1, 0.0, 1.0)),
        (0, 63, True, Difference(True, 0.001, 0.3, 0.0, 1.0)),
        (1, 64, True, Difference(True, 2.0, 0.5, 1.0, 0.5)),
        (1, 20000, True, Difference(False, 0.0, 0.0, 0.0, 1.0)),
    ]
    return Table.of(rows)


def test_buckets_are_by_context_length_and_hold_every_row_once() -> None:
    parts = table().buckets()
    assert {name: len(part) for name, part in parts.items()} == {"0-63": 2, "64-255": 1, "16384+": 1}


def test_buckets_that_few_prompts_reach_are_joined_with_those_before_them() -> None:
    assert {name: len(part) for name, part in table().buckets(least=2).items()} == {"0+": 4}
    assert list(Table.of(list(zip([0, 1, 0], [3, 3, 70], [True] * 3, [SAME] * 3, strict=True))).buckets(least=2)) == [
        "0-255"
    ]


def test_a_summary_tells_near_ties_from_real_flips() -> None:
    found = summarize(table(), near_tie=0.01)
    assert (found.num_tokens, found.num_prompts, found.flip_rate, found.real_flip_rate) == (4, 2, 0.5, 0.25)
    assert found.kl_mean == pytest.approx(0.225) and found.kl_max == 0.5


def test_a_prompt_counts_once_however_many_tokens_it_has() -> None:
    assert np.allclose(table().per_cluster(table().kl), [0.2, 0.25])


def test_an_empty_table_has_no_numbers() -> None:
    assert math.isnan(summarize(Table.of([]), 0.01).kl_mean) and not Table.of([]).buckets()
