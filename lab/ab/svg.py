"""Small charts as inline SVG. They know nothing of what they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 14, 44
Number = Callable[[float], str]


class Series(NamedTuple):
    """One line, or one kind of bar."""

    name: str
    style: str  # its CSS class
    values: Sequence[float | None]  # None: nothing there


class Interval(NamedTuple):
    """A value with its bounds."""

    name: str
    value: float
    low: float
    high: float


def lines(series: Sequence[Series], labels: Sequence[str], *, x: str, y: str, number: Number, log: bool = False) -> str:
    """Lines over equally spaced labels. On a logarithmic axis 0 lies at its foot."""
    axis = _Axis([v for s in series for v in s.values if v is not None], log)
    step = (WIDTH - LEFT - RIGHT) / max(len(labels), 1)
    at = [LEFT + step * (i + 0.5) for i in range(len(labels))]
    body = axis.drawn(number) + _labels(labels, at)
    for one in series:
        points = [(px, axis.place(v), v) for px, v in zip(at, one.values, strict=True) if v is not None]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
        body += f'<polyline class="{one.style}" points="{path}"/>'
        if len(points) <= 16:
            body += "".join(
                f'<circle class="{one.style}" cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{escape(one.name)}: {number(v)}</title></circle>'
                for px, py, v in points
            )
    return _figure(body, series, x, y)


def bars(series: Sequence[Series], labels: Sequence[str], *, x: str, y: str, number: Number) -> str:
    """Bars beside each other over equally spaced labels."""
    axis = _Axis([0.0, *(v for s in series for v in s.values if v is not None)], False)
    step = (WIDTH - LEFT - RIGHT) / max(len(labels), 1)
    wide = 0.8 * step / max(len(series), 1)
    body = axis.drawn(number) + _labels(labels, [LEFT + step * (i + 0.5) for i in range(len(labels))])
    foot = axis.place(0.0)
    for index, one in enumerate(series):
        for i, value in enumerate(one.values):
            if value:
                left, top = LEFT + step * (i + 0.1) + wide * index, axis.place(value)
                body += (
                    f'<rect class="{one.style}" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" '
                    f'height="{foot - top:.1f}"><title>{escape(one.name)}: {number(value)}</title></rect>'
                )
    return _figure(body, series, x, y)


def intervals(rows: Sequence[Interval], *, x: str, number: Number) -> str:
    """Ratios with their bounds, a row each, on a logarithmic axis around 1."""
    reach = max([1.25, *(v for r in rows for v in (r.high, 1 / r.low) if 0 < v < math.inf)])
    reach = min(reach, 64.0)  # what is wider leaves the picture
    height = 44 + 34 * len(rows)
    left = 130

    def place(value: float) -> float:
        share = math.log(max(min(value, reach), 1 / reach)) / math.log(reach)
        return left + (WIDTH - left - RIGHT) * (share + 1) / 2

    body = f'<line class="one" x1="{place(1):.1f}" x2="{place(1):.1f}" y1="6" y2="{height - 38}"/>'
    for index, row in enumerate(rows):
        y = 20 + 34 * index
        body += (
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(row.name)}</text>'
            f'<line class="b" x1="{place(row.low):.1f}" x2="{place(row.high):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="b" cx="{place(row.value):.1f}" cy="{y}" r="4"><title>{number(row.value)} '
            f"({number(row.low)} to {number(row.high)})</title></circle>"
        )
    for value in dict.fromkeys((1 / reach, 1 / math.sqrt(reach), 1.0, math.sqrt(reach), reach)):
        body += f'<text x="{place(value):.1f}" y="{height - 22}" text-anchor="middle">{number(value)}</text>'
    middle = (left + WIDTH - RIGHT) / 2
    body += f'<text class="title" x="{middle}" y="{height - 4}" text-anchor="middle">{escape(x)}</text>'
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{body}</svg>'


class _Axis:
    """The vertical one."""

    def __init__(self, values: Sequence[float], log: bool) -> None:
        positive = [v for v in values if v > 0]
        self._log = log and bool(positive)
        self._low, self._high = 0.0, _round_up(max([*values, 0.0]) or 1.0)
        if self._log:
            self._low = math.floor(math.log10(min(positive)))
            self._high = max(math.ceil(math.log10(max(positive))), self._low + 1)

    def place(self, value: float) -> float:
        if self._log:
            value = math.log10(value) if value > 0 else self._low
        share = (value - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def drawn(self, number: Number) -> str:
        """Grid and numbers."""
        if self._log:
            every = max(1, round((self._high - self._low) / 5))
            values = [10.0**power for power in range(int(self._low), int(self._high) + 1, every)]
        else:
            values = [self._high * part / 4 for part in range(5)]
        return "".join(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.place(v):.1f}" y2="{self.place(v):.1f}"/>'
            f'<text x="{LEFT - 6}" y="{self.place(v) + 4:.1f}" text-anchor="end">{number(v)}</text>'
            for v in values
        )


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 4, 5, 8, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 4, 5, 8, 10) if step * power >= value * 0.999999)


def _labels(labels: Sequence[str], at: Sequence[float]) -> str:
    every = max(1, math.ceil(len(labels) / 11))
    return "".join(
        f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(label)}</text>'
        for i, (label, px) in enumerate(zip(labels, at, strict=True))
        if i % every == 0
    )


def _figure(body: str, series: Sequence[Series], x: str, y: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    body += f'<text class="title" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>'
    keys = "".join(f'<span><i class="{one.style}"></i>{escape(one.name)}</span>' for one in series)
    return f'<p class="key"><b>{escape(y)}</b>{keys}</p><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{body}</svg>'
