"""The page's own arithmetic: what is marked, where things are drawn."""

from __future__ import annotations

import re

from turnout.lab.ab.page import _marked
from turnout.lab.ab.svg import Interval, Series, bars, intervals, lines


def test_words_that_only_one_text_has_are_marked_in_it_and_markup_is_text() -> None:
    assert _marked("the red <b>", "the blue <b> car") == (
        "the <mark>red</mark> &lt;b&gt;",
        "the <mark>blue</mark> &lt;b&gt;<mark> car</mark>",
    )


def heights(svg: str) -> list[float]:
    return [float(y) for y in re.findall(r'<circle[^>]*cy="([\d.]+)"', svg)]


def test_larger_values_are_higher_and_nothing_is_drawn_where_nothing_is() -> None:
    drawn = lines([Series("s", "b", [1.0, None, 3.0])], ["a", "b", "c"], x="x", y="y", number=str)
    one, three = heights(drawn)
    assert one > three


def test_a_logarithmic_axis_has_equal_steps_and_zero_at_its_foot() -> None:
    drawn = lines([Series("s", "b", [0.0, 1e-6, 1e-4, 1e-2])], list("abcd"), x="x", y="y", number=str, log=True)
    zero, *rest = heights(drawn)
    assert zero >= rest[0]
    assert abs((rest[0] - rest[1]) - (rest[1] - rest[2])) < 0.2


def test_a_picture_of_nothing_is_a_picture() -> None:
    assert lines([Series("s", "b", [0.0])], ["a"], x="x", y="y", number=str, log=True).endswith("</svg>")
    assert "<rect" not in bars([Series("s", "b", [0.0])], ["a"], x="x", y="y", number=str)


def test_a_ratio_of_one_is_in_the_middle_and_wide_bounds_stay_in_the_picture() -> None:
    drawn = intervals([Interval("r", 1.0, 1e-9, 1e9)], x="x", number=str)
    (middle,) = re.findall(r'class="one" x1="([\d.]+)"', drawn)
    assert f'cx="{middle}"' in drawn
    assert all(0 <= float(x) <= 520 for x in re.findall(r'x[12]="([\d.]+)"', drawn))
