"""Verdicts in plain words: what decided, what is missing. It computes nothing."""

from __future__ import annotations

from turnout.lab.compare.run import Comparison
from turnout.lab.compare.verdict import MIN_PROMPTS, Finding, Verdict

MEASURES = {  # measure -> (what it is, its unit)
    "kl": ("KL divergence", " nats a token"),
    "flips": ("tokens whose likeliest changed, near ties aside", ""),
    "greedy": ("greedy writings that part, near ties aside", ""),
    "sampled": ("sampled writings that part beyond what the distributions explain", ""),
    "surprise": ("sampled tokens are less likely than the temperature makes them", " nats a token"),
}
NUM_REASONS = 4


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
    wanting = max(mine, key=lambda f: f.needed or 0)
    told = [
        f"{_name(wanting)}: between {_number(wanting.low, wanting)} and {_number(wanting.high, wanting)}; "
        f"{wanting.num_prompts} prompts can't show whether it is above {_number(wanting.effect, wanting)}"
        if wanting.num_prompts >= MIN_PROMPTS
        else f"{_name(wanting)}: known from {wanting.num_prompts} prompts only"
    ]
    return [*told, f"about {wanting.needed} prompts would settle it: num_prompts={wanting.needed}"]


def _above(finding: Finding) -> str:
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
