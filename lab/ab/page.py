"""The result as one HTML file that needs nothing else: no network, no script, pictures inside. It computes nothing."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from turnout.lab.ab.report import nats, per_second, percent, seconds
from turnout.lab.ab.result import QUANTILES
from turnout.lab.ab.style import CSS
from turnout.lab.ab.svg import Interval, Series, bars, intervals, lines

Values = Mapping[str, Any]


def page(result: Values) -> str:
    """The whole document."""
    comparisons = result["comparisons"]
    parts = [_matrix(result)] if len(comparisons) > 1 else []
    parts += [_comparison(result, found, number) for number, found in enumerate(comparisons, 1)]
    title = f"turnout ab: {' · '.join(dict.fromkeys(found['verdict'] for found in comparisons))}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{CSS}</style></head><body><main>{''.join(parts)}{_provenance(result)}</main></body></html>\n"
    )


def _matrix(result: Values) -> str:
    rows = []
    for number, found in enumerate(result["comparisons"], 1):
        all_, greedy, ratio = found["all"]["b"], found["writing"]["greedy"]["b"], found["speed"]["ratios"]
        cells = [
            f'<a href="#b{number}">{escape(found["b"]["name"])}</a>',
            f'<b class="{_style(found)}">{found["verdict"]}</b>',
            nats(all_["kl_mean"]),
            percent(all_["flip_rate"]),
            percent(all_["real_flip_rate"]),
            f"{greedy['same']} of {greedy['num']}",
            *(_ratio(ratio[name]) if name in ratio else "" for name in ("output tokens/s", "TTFT p50", "ITL p50")),
        ]
        rows.append(cells)
    head = ["B", "verdict", "KL mean", "flips", "real flips", "greedy same", "tokens/s", "TTFT p50", "ITL p50"]
    return f"<h1>against A, {escape(result['a']['name'])}</h1>{_table(head, rows)}"


def _comparison(result: Values, found: Values, number: int) -> str:
    why = "".join(f"<li>{escape(reason)}</li>" for reason in found["because"])
    work = result["workload"]
    return (
        f'<section id="b{number}"><header class="{_style(found)}"><h1>{found["verdict"]}</h1>'
        f"<p><b>A</b> {escape(result['a']['name'])} &nbsp; <b>B</b> {escape(found['b']['name'])}</p><ul>{why}</ul>"
        f"<p>{work['num_prompts']} prompts of {work['shortest']} to {work['longest']} tokens "
        f"({escape(work['name'])})</p></header>"
        f"{_charts(found)}{_numbers(found)}{_writings(found)}{_tokens(found)}</section>"
    )


def _charts(found: Values) -> str:
    labels = list(found["buckets"])

    def of(side: str, key: str) -> list[float | None]:
        return [part[side][key] for part in found["buckets"].values()]

    flips = [
        Series("all flips", "b", of("b", "flip_rate")),
        Series("without near ties", "c", of("b", "real_flip_rate")),
        Series("A against itself", "noise", of("noise", "flip_rate")),
    ]
    kl = [
        Series("B mean", "b", of("b", "kl_mean")),
        Series("B p99", "c", of("b", "kl_p99")),
        Series("A against itself, mean", "noise", of("noise", "kl_mean")),
    ]
    decades = [f"1e{power}" for power in found["kl"]["decades"][:-1]]
    spread = [
        Series("B", "b", _shares(found["kl"]["b"])),
        Series("A against itself", "noise", _shares(found["kl"]["noise"])),
    ]
    context = "tokens before it"
    charts = [
        lines(flips, labels, x=context, y="flipped tokens", number=percent),
        lines(kl, labels, x=context, y="KL divergence, nats a token", number=nats, log=True),
        bars(spread, ["less", *decades], x="KL divergence, nats a token", y="share of tokens", number=percent),
        *_speed(found["speed"]),
    ]
    return f'<div class="charts">{"".join(f"<figure>{chart}</figure>" for chart in charts)}</div>'


def _shares(histogram: Values) -> list[float | None]:
    counts = [histogram["below"], *histogram["counts"]]
    return [count / max(sum(counts), 1) for count in counts]


def _speed(speed: Values) -> list[str]:
    """Ratios with their intervals, and the latencies of both sides."""
    charts = []
    if speed["ratios"]:
        rows = [Interval(name, r["mean"], r["low"], r["high"]) for name, r in speed["ratios"].items()]
        charts.append(
            '<p class="key"><b>speed, B / A, with 95 % intervals</b></p>'
            + intervals(rows, x="B / A", number=lambda v: f"{v:.3g}")
        )
    for key, title in (("ttft", "time to first token"), ("itl", "time between tokens")) if speed["rounds"] else ():
        curves = [
            Series(side.upper(), style, speed[side][f"{key}_quantiles"]) for side, style in (("a", "noise"), ("b", "b"))
        ]
        if all(len(curve.values) == len(QUANTILES) for curve in curves):
            labels = [f"p{q}" for q in QUANTILES]
            charts.append(lines(curves, labels, x="quantile", y=title, number=seconds, log=True))
    return charts


def _numbers(found: Values) -> str:
    head = ["", "tokens", "flips", "real flips", "KL mean", "KL p99", "KL max", "gap", "overlap"]
    rows = []
    for word, parts in (("context ", found["buckets"]), ("token ", found["positions"]), ("", {"all": found["all"]})):
        for name, part in parts.items():
            b, noise = part["b"], part["noise"]
            cells = [f"{word}{name}", f"{b['num_tokens']:,}"]
            for key in ("flip_rate", "real_flip_rate", "kl_mean", "kl_p99", "kl_max", "gap_mean", "overlap"):
                show = percent if key in ("flip_rate", "real_flip_rate", "overlap") else nats
                cells.append(f"{show(b[key])} <small>{show(noise[key])}</small>")
            rows.append(cells)
    made = f"<h2>The same tokens forced on both</h2><p>Small: A against itself. A near tie is below {found['near_tie']:g} nats.</p>"
    made += _table(head, rows)
    tests = [
        [f["measure"], f["bucket"], str(f["num_prompts"]), nats(f["mean"]), _span(f), nats(f["effect"]), f["verdict"]]
        for f in found["findings"]
    ]
    made += "<h2>What was judged</h2>" + _table(
        ["measure", "contexts", "prompts", "excess over the noise", "bounds", "matters", "verdict"], tests
    )
    speed = found["speed"]
    if speed["rounds"]:
        shown = [
            [name, *((per_second if "/s" in name else seconds)(speed[s][name]) for s in "ab"), *_ratios(speed, name)]
            for name in speed["a"]
            if not name.endswith("_quantiles")
        ]
        made += f"<h2>Speed, {speed['rounds']} rounds in turns</h2>" + _table(["", "A", "B", "B / A"], shown)
    return made


def _span(finding: Values) -> str:
    return f"{nats(finding['low']) or '-∞'} … {nats(finding['high']) or '∞'}"


def _ratios(speed: Values, name: str) -> list[str]:
    return [_ratio(speed["ratios"][name])] if name in speed["ratios"] else [""]


def _ratio(ratio: Values) -> str:
    return f"× {ratio['mean']:.3g} <small>{ratio['low']:.3g} … {ratio['high']:.3g}</small>"


def _writings(found: Values) -> str:
    made = "<h2>Free writing</h2>"
    for kind, sides in found["writing"].items():
        b, noise = sides["b"], sides["noise"]
        made += f"<p>{kind}: {b['same']} of {b['num']} the same; A against itself {noise['same']} of {noise['num']}"
        if b["first_divergence_min"] is not None:
            made += (
                f"; first difference at token {b['first_divergence_min']}, in the median {b['first_divergence_median']}"
            )
        if b["parted_at_a_near_tie"]:
            made += f"; {b['parted_at_a_near_tie']} part at a near tie"
        made += ".</p>"
    answers = found["answers"]
    if answers["checked"]:
        flipped = f": {escape(', '.join(answers['flipped']))}" if answers["flipped"] else ""
        made += (
            f"<p>Answers: A has {answers['a_right']} and B {answers['b_right']} of {answers['checked']} right, "
            f"{len(answers['flipped'])} flipped{flipped}.</p>"
        )
    for one in found["worst"]["writings"]:
        a, b = _marked(one["a"], one["b"])
        kind = "sampled" if one["sampled"] else "greedy"
        made += (
            f"<article><p><b>{escape(one['item'])}</b>, {kind}: parts at token {one['position']} ({one['context']} before "
            f"it); A held its own token by {one['margin']:.3g} nats</p>"
            f'<pre class="prompt">…{escape(one["prompt_end"])}</pre><div class="two">'
            f'<pre><b>A</b>\n<span class="same">{escape(one["shared"])}</span>{a}</pre>'
            f'<pre><b>B</b>\n<span class="same">{escape(one["shared"])}</span>{b}</pre></div></article>'
        )
    return made


def _marked(a: str, b: str) -> tuple[str, str]:
    """Both texts with what is not in the other marked, by words."""
    mine, theirs = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (a, b))
    left, right = "", ""
    for kind, i, j, k, m in difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        one, two = escape("".join(mine[i:j])), escape("".join(theirs[k:m]))
        left += one if kind == "equal" or not one else f"<mark>{one}</mark>"
        right += two if kind == "equal" or not two else f"<mark>{two}</mark>"
    return left, right


def _tokens(found: Values) -> str:
    rows = [
        [
            escape(one["item"]),
            f"{one['context']:,}",
            "decoded" if one["decoded"] else "prompt",
            nats(one["kl"]),
            f"flip, {one['margin']:.2g} nats" if one["flip"] else "",
            f"<code>…{escape(one['before'][-60:])}</code>",
        ]
        for one in found["worst"]["tokens"]
        if one["kl"]
    ]
    head = ["prompt", "tokens before it", "scored", "KL", "", "what stands before it"]
    return f"<h2>Tokens furthest apart</h2>{_table(head, rows)}" if rows else ""


def _provenance(result: Values) -> str:
    origin = {key: value for key, value in result.items() if key != "comparisons"}
    origin["b"] = [found["b"] for found in result["comparisons"]]
    shown = escape(json.dumps(origin, indent=1, ensure_ascii=False))
    command = escape(" ".join(result["command"]))
    return f"<footer><p><code>{command}</code></p><details><summary>What was compared, where, how</summary><pre>{shown}</pre></details></footer>"


def _style(found: Values) -> str:
    return str(found["verdict"]).partition(" ")[0]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
