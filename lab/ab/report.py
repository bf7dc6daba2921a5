"""The result on one screen: the verdict in words, then the numbers it rests on. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Values = Mapping[str, Any]
COLOURS = {"equivalent": "green", "different": "red", "not enough data": "yellow"}


def show(console: Console, result: Values) -> None:
    """Print it: everything for one comparison; for several a matrix, and why."""
    comparisons = result["comparisons"]
    if len(comparisons) > 1:
        console.print(matrix(result))
        for found in comparisons:
            _verdict(console, found)
        _sides(console, result, comparisons)
        return
    (found,) = comparisons
    _verdict(console, found)
    _sides(console, result, comparisons)
    console.print(scores(found))
    _writing(console, found)
    _speed(console, found)


def matrix(result: Values) -> Table:
    """Each B against the one A."""
    made = _table(f"against A, {result['a']['name']}", "B", "verdict", "KL", "flips", "real", "greedy same", "tokens/s")
    for found in result["comparisons"]:
        all_, greedy = found["all"]["b"], found["writing"]["greedy"]["b"]
        ratio = found["speed"]["ratios"].get("output tokens/s")
        verdict = f"[{COLOURS[found['verdict']]}]{found['verdict']}[/]"
        shares = (percent(all_["flip_rate"]), percent(all_["real_flip_rate"]), f"{greedy['same']} of {greedy['num']}")
        made.add_row(
            _plain(found["b"]["name"]),
            verdict,
            nats(all_["kl_mean"]),
            *shares,
            f"× {ratio['mean']:.3g}" if ratio else "",
        )
    return made


def _verdict(console: Console, found: Values) -> None:
    colour = COLOURS[found["verdict"]]
    console.print(f"[bold {colour}]{found['verdict'].upper()}[/]  {_plain(found['b']['name'])}", highlight=False)
    for why in found["because"]:
        console.print(f"  {why}", markup=False, highlight=False)


def _sides(console: Console, result: Values, comparisons: Sequence[Values]) -> None:
    """What was compared, and on what."""
    work = result["workload"]
    lines = [f"{work['num_prompts']} prompts of {work['shortest']} to {work['longest']} tokens, {work['name']}"]
    for name, side in (("A", result["a"]), *(("B", found["b"]) for found in comparisons)):
        made = " ".join(str(side[key]) for key in ("dtype", "fingerprint") if side.get(key))
        lines.append(f"{name}: {side['name']}  {made}")
    for line in lines:
        console.print(f"  {line}", style="dim", markup=False, highlight=False)


def scores(found: Values) -> Table:
    """Forced tokens by context and position, the noise of A against itself beside."""
    title = (
        f"the same tokens forced on both; in brackets A against itself; a near tie is below {found['near_tie']:g} nats"
    )
    made = _table(title, "", "tokens", "flips", "real flips", "KL mean", "KL p99", "KL max", "gap", "overlap")
    groups = (("context ", found["buckets"]), ("token ", found["positions"]))
    for word, parts in (*groups, ("", {"all": found["all"]})):
        for name, part in parts.items():
            made.add_row(f"{word}{name}", *_row(part["b"], part["noise"]))
        made.add_section()
    return made


def _row(b: Values, noise: Values) -> list[str]:
    cells = [(percent(b[k]), percent(noise[k])) for k in ("flip_rate", "real_flip_rate")]
    cells += [(nats(b[k]), nats(noise[k])) for k in ("kl_mean", "kl_p99", "kl_max", "gap_mean")]
    cells.append((percent(b["overlap"]), percent(noise["overlap"])))
    return [f"{b['num_tokens']:,}", *(f"{value}\n[dim]({floor})[/]" for value, floor in cells)]


def _writing(console: Console, found: Values) -> None:
    for kind, sides in found["writing"].items():
        b, noise = sides["b"], sides["noise"]
        line = f"free writing, {kind}: {b['same']} of {b['num']} the same (A against itself: {noise['same']})"
        if b["first_divergence_min"] is not None:
            line += f"; first difference at token {b['first_divergence_min']}, median {b['first_divergence_median']}"
        if b["parted_at_a_near_tie"]:
            line += f"; {b['parted_at_a_near_tie']} part at a near tie"
        console.print(line, highlight=False)
    answers = found["answers"]
    if answers["checked"]:
        console.print(
            f"answers: A has {answers['a_right']} and B {answers['b_right']} of {answers['checked']} right; "
            f"{len(answers['flipped'])} flipped",
            highlight=False,
        )


def _speed(console: Console, found: Values) -> None:
    speed = found["speed"]
    if not speed["rounds"]:
        return
    made = _table("speed", "", "A", "B", "B / A", "95 % interval")
    for name in speed["a"]:
        if name.endswith("_quantiles"):
            continue
        ratio, show_ = speed["ratios"].get(name), per_second if "/s" in name else seconds
        shown = (
            (f"× {ratio['mean']:.3f}", f"{ratio['low']:.3f} to {ratio['high']:.3f}")
            if ratio
            else ("", "needs rounds=2")
        )
        made.add_row(name, show_(speed["a"][name]), show_(speed["b"][name]), *shown)
    console.print(made)


def percent(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{100 * value:.3g} %"


def nats(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.2g}"


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:.3g} ms" if value < 1.0 else f"{value:.3g} s"


def per_second(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _plain(text: str) -> str:
    """Text that rich shows as it is."""
    from rich.markup import escape

    return escape(text)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(
        title=title, title_justify="left", title_style="", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=bool(index), overflow="fold")
    return made
