"""What is said where the data do not suffice: more prompts where some more do, else other ones."""

from __future__ import annotations

import pytest

from turnout.lab.compare.measures import Difference, Table
from turnout.lab.compare.run import Comparison
from turnout.lab.compare.verdict import Finding, Verdict
from turnout.lab.compare.words import because


def undecided(measure: str, bucket: str, needed: int, lengths: tuple[int, ...] = (30, 40, 900)) -> str:
    finding = Finding(measure, bucket, 24, 1e-3, -1.0, 1.0, 1e-6, Verdict.NOT_ENOUGH_DATA, needed)
    rows = [(n, 10, True, Difference(False, 0.0, 10.0**-n, 0.0, 1.0)) for n in range(len(lengths))]
    table = Table.of(rows)
    return "\n".join(
        because(Comparison("a", "b", finding.verdict, [finding], table, table, [], [], 1e-3, {"kl": 1e-6}, {}, lengths))
    )


@pytest.mark.parametrize(
    ("measure", "bucket", "needed", "remedy"),
    [
        ("kl", "0-63", 40, "num_prompts=40"),
        ("kl", "1024+", 1552, "workload=long_context"),
        ("kl", "0-63", 1552, "prompts like prompt 0 of 30 tokens, prompt 1 of 40 tokens"),
        ("surprise", "hotter", 1552, "effects.surprise="),
    ],
)
def test_no_more_prompts_are_asked_for_than_anybody_waits_for(
    measure: str, bucket: str, needed: int, remedy: str
) -> None:
    said = undecided(measure, bucket, needed)
    assert remedy in said and "1552" not in said


def test_long_prompts_that_do_not_suffice_are_not_answered_with_long_prompts() -> None:
    assert "workload=FILE" in undecided("kl", "1024+", 1552, (2000, 3000))
