"""Verdicts in plain words: what decided, what is missing. It computes nothing."""

from __future__ import annotations

import re

import numpy as np

from turnout.lab.compare.run import Comparison
from turnout.lab.compare.verdict import MIN_PROMPTS, ONE, Finding, Verdict

MEASURES = {  # measure -> (what it is, its unit)
    "kl": ("KL divergence", " nats a token"),
    "flips": ("tokens whose likeliest changed, near ties aside", ""),
    "greedy": ("greedy writings that part, near ties aside", ""),
    "sampled": ("sampled writings that part beyond what the distributions explain", ""),
    "surprise": ("sampled tokens are less likely than the temperature makes them", " nats a token"),
}
NUM_REASONS, NUM_WORST = 4, 3
MANY_PROMPTS = 200  # nobody waits for more
LONG = 256  # tokens


def because(found: Comparison) -> list[str]:
    """Why the verdict is what it is, a sentence each."""
    mine = [finding for finding in found.findings if finding.verdict is found.verdict]
    if found.verdict is Verdict.DIFFERENT:
        mine.sort(key=lambda f: -f.mean / f.effect)
        told = [_above(finding) for finding in mine[:NUM_REASONS]]
        return told + ([f"and {len(mine) - NUM_REASONS} more"] if len(mine) > NUM_REASONS else [])
    if found.verdict is Verdict.EQUIVALENT:
        closest = max(mine, key=lambda f: f.high / f.effect)
        most, matters = _number(closest.high, closest), _number(closest.effect, closest)
        return [
            f"all {len(mine)} measures are below what matters, judged over {max(f.num_prompts for f in mine)} prompts",
            f"closest to it: {_name(closest)}, at most {most}; {matters} would matter",
        ]
    if not mine:
        return ["there is nothing to judge"]
    return _wanting(max(mine, key=lambda f: f.needed or 0), found)


def _wanting(finding: Finding, found: Comparison) -> list[str]:
    """What could not be told, and what would tell it: more prompts where some more do, else other ones."""
    if finding.num_prompts < MIN_PROMPTS:
        why = f"{_name(finding)}: known from {finding.num_prompts} prompts only"
    else:
        why = (
            f"{_name(finding)}: between {_number(finding.low, finding)} and {_number(finding.high, finding)}; "
            f"{finding.num_prompts} prompts can't show whether it is above {_number(finding.effect, finding)}"
        )
    needed, lowest = finding.needed or 0, re.match(r"\d+", finding.bucket)
    if needed <= max(MANY_PROMPTS, 3 * len(found.lengths)):
        remedy = f"about {needed} prompts would settle it: num_prompts={needed}"
    elif lowest and int(lowest.group()) >= LONG and min(found.lengths) < LONG:
        remedy = "few of these prompts are so long; workload=long_context has such prompts only"
    elif finding.measure in ("kl", "flips"):
        remedy = f"it lies in few prompts: a file of prompts like {', '.join(_worst(found))} decides it, workload=FILE"
    else:
        remedy = f"no number of prompts of this kind will: say what matters to you, effects.{finding.measure}=…"
    return [why, remedy]


def _worst(found: Comparison) -> list[str]:
    """The prompts that differ most, by name and length."""
    excess = found.table.per_cluster(found.table.kl)
    clusters = np.unique(found.table.cluster)
    names = dict.fromkeys(d.item for d in found.divergences)
    listed = list(names) if len(names) == len(found.lengths) else [f"prompt {n}" for n in range(len(found.lengths))]
    rows = [int(clusters[row]) for row in np.argsort(-excess, kind="stable")[:NUM_WORST]]
    return [f"{listed[row]} of {found.lengths[row]} tokens" for row in rows]


def _above(finding: Finding) -> str:
    if finding.bucket == ONE:
        many = f"{finding.num_prompts} prompts" if finding.num_prompts > 1 else "one prompt"
        return (
            f"{MEASURES['kl'][0]} over all tokens of {many}: up to {_number(finding.mean, finding)}, more than a million "
            f"times A's own noise anywhere; {_number(finding.effect, finding)} matters"
        )
    if finding.low > finding.effect:
        surely = f"surely more than {_number(finding.low, finding)}"
    else:
        surely = "above what matters in more prompts than chance explains"
    return (
        f"{_name(finding)}: {_number(finding.mean, finding)} above A's own noise, {surely}; "
        f"{_number(finding.effect, finding)} matters"
    )


def _name(finding: Finding) -> str:
    if finding.bucket == "colder":
        return "sampled tokens are likelier than the temperature makes them"
    where = "" if finding.bucket in ("all", "hotter") else f" in contexts of {finding.bucket} tokens"
    return MEASURES[finding.measure][0] + where


def _number(value: float, finding: Finding) -> str:
    unit = MEASURES[finding.measure][1]
    return f"{value:.2g}{unit}" if unit else f"{100 * value:.3g} %"
