"""What a comparison found, as plain values: the JSON file, of which the table and the page are made."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from turnout.lab.compare.measures import Table, summarize
from turnout.lab.compare.run import Comparison
from turnout.lab.compare.sides import Item, Side, Speed
from turnout.lab.compare.speed import MEASURES, Race
from turnout.lab.compare.verdict import MIN_PROMPTS, Verdict
from turnout.lab.compare.words import because
from turnout.lab.compare.writings import Divergence

if TYPE_CHECKING:
    from turnout.lab.ab.config import AbConfig
    from turnout.lab.ab.opening import Opened
    from turnout.server.text.tokenizer import Text

Values = dict[str, Any]
POSITIONS = (0, 1, 4, 16, 64, 256)  # lower ends, in tokens after the prompt
DECADES = np.arange(-12, 2)  # of the KL histogram
QUANTILES = tuple(range(0, 101, 2))  # of latencies, per cent
NUM_WORST = 8


def describe(
    config: AbConfig, args: Sequence[str], ready: Opened, found: Sequence[Comparison], races: Sequence[Race]
) -> Values:
    """Everything, ready for JSON."""
    pairs = zip(found, races, ready.others, strict=True)
    result = {
        "turnout": version("turnout"),
        "command": ["turnout ab", *("api_key=***" if arg.startswith("api_key=") else arg for arg in args)],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "settings": _settings(config),
        "workload": _workload(config.workload, ready.items),
        "a": _side(ready.a),
        "exit_code": exit_code([c.verdict for c in found]),
        "comparisons": [_comparison(c, r, _side(b), ready.items, ready.text) for c, r, b in pairs],
    }
    return _jsonable(result)


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """The worst of all: one that is different decides, then one that can't be told."""
    for verdict in (Verdict.DIFFERENT, Verdict.NOT_ENOUGH_DATA):
        if verdict in verdicts:
            return verdict.value
    return Verdict.EQUIVALENT.value


def machine() -> Values:
    """Where it ran."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cpu = torch.backends.cpu.get_cpu_capability()
    return {
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {cpu}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": devices,
    }


def _settings(config: AbConfig) -> Values:
    kept = ("num_prompts", "max_tokens", "num_top", "temperature", "seed", "rounds")
    return {name: getattr(config, name) for name in kept} | {
        "judge": vars(config.judge),
        "effects": vars(config.effects),
    }


def _workload(name: str, items: Sequence[Item]) -> Values:
    lengths = [len(item.prompt) for item in items]
    return {"name": name, "num_prompts": len(items), "shortest": min(lengths), "longest": max(lengths)}


def _side(side: Side) -> Values:
    return {"name": side.name, "dtype": side.dtype} | dict(side.origin)


def _comparison(found: Comparison, race: Race, b: Values, items: Sequence[Item], text: Text) -> Values:
    buckets = found.noise.buckets(least=MIN_PROMPTS)
    return {
        "b": b,
        "verdict": found.verdict.name.lower().replace("_", " "),
        "because": because(found),
        "findings": [f._asdict() | {"verdict": f.verdict.name.lower().replace("_", " ")} for f in found.findings],
        "near_tie": found.near_tie,
        "effects": dict(found.effects),
        "all": _beside(found.table, found.noise, found.near_tie),
        "buckets": {
            name: _beside(part, buckets[name], found.near_tie)
            for name, part in found.table.buckets(least=MIN_PROMPTS).items()
        },
        "positions": _positions(found),
        "writing": {
            kind: {"b": _writing(found, sampled, own=False), "noise": _writing(found, sampled, own=True)}
            for kind, sampled in (("greedy", False), ("sampled", True))
            if any(d.sampled is sampled for d in found.divergences)
        },
        "answers": _answers(found),
        "kl": {"decades": DECADES.tolist(), "b": _histogram(found.table), "noise": _histogram(found.noise)},
        "speed": _speed(race),
        "worst": {"writings": _worst_writings(found, items, text), "tokens": _worst_tokens(found, items, text)},
    }


def _beside(table: Table, noise: Table, near_tie: float) -> Values:
    return {"b": summarize(table, near_tie)._asdict(), "noise": summarize(noise, near_tie)._asdict()}


def _positions(found: Comparison) -> Values:
    """By the place after the prompt, of forced tokens that were decoded."""
    parts = {}
    for table in (found.table, found.noise):
        decoded = table.where(table.decoded)
        place = decoded.context - np.array(found.lengths)[decoded.cluster] if len(decoded) else decoded.context
        parts[id(table)] = dataclasses.replace(decoded, context=place).buckets(POSITIONS)
    ours, floor = parts[id(found.table)], parts[id(found.noise)]
    return {name: _beside(part, floor[name], found.near_tie) for name, part in ours.items()}


def _writing(found: Comparison, sampled: bool, *, own: bool) -> Values:
    """How free writings part."""
    mine = [d for d in (found.own_divergences if own else found.divergences) if d.sampled is sampled]
    parted = [d for d in mine if d.position is not None]
    at = sorted(d.position for d in parted if d.position is not None)
    return {
        "num": len(mine),
        "same": len(mine) - len(parted),
        "parted_at_a_near_tie": None if sampled else sum(d.margin < found.near_tie for d in parted),
        "first_divergence_median": at[len(at) // 2] if at else None,
        "first_divergence_min": at[0] if at else None,
    }


def _answers(found: Comparison) -> Values:
    right = found.answers.values()
    flipped = [name for name, (a, b) in found.answers.items() if a is not b]
    return {
        "checked": len(right),
        "a_right": sum(a for a, _ in right),
        "b_right": sum(b for _, b in right),
        "flipped": flipped,
    }


def _histogram(table: Table) -> Values:
    """Tokens by the power of ten of their KL; `below`: less than the smallest."""
    if not len(table):
        return {"counts": [0] * (len(DECADES) - 1), "below": 0}
    counts, _ = np.histogram(np.clip(table.kl, None, 9.99), bins=10.0**DECADES)
    return {"counts": counts.tolist(), "below": int((table.kl < 10.0 ** DECADES[0]).sum())}


def _speed(race: Race) -> Values:
    """Ratios B / A, and how long either took."""
    pooled = {"a": [one for one, _ in race.rounds], "b": [two for _, two in race.rounds]}
    return {
        "rounds": len(race.rounds),
        "ratios": {name: ratio._asdict() for name, ratio in race.ratios().items()},
        **{
            name: {
                **{title: float(np.median([of(speed) for speed in speeds])) for title, of in MEASURES.items()},
                **_curves(speeds),
            }
            for name, speeds in pooled.items()
            if speeds
        },
    }


def _curves(speeds: Sequence[Speed]) -> Values:
    every = {"ttft": [t for s in speeds for t in s.ttft], "itl": [t for s in speeds for t in s.itl]}
    return {f"{name}_quantiles": np.percentile(v, QUANTILES).tolist() if v else [] for name, v in every.items()}


def _worst_writings(found: Comparison, items: Sequence[Item], text: Text) -> list[Values]:
    """Greedy writings that part, the least excusable first."""
    by_id = {item.id: item for item in items}
    parted = [d for d in found.divergences if d.position is not None]
    parted.sort(key=lambda d: (d.sampled, -d.margin))
    return [_writing_of(d, by_id[d.item], text) for d in parted[:NUM_WORST]]


def _writing_of(d: Divergence, item: Item, text: Text) -> Values:
    at = d.position or 0
    shared = text.decode(d.a[:at], skip_special_tokens=False)
    return {
        "item": d.item,
        "sampled": d.sampled,
        "position": d.position,
        "context": len(item.prompt) + at,
        "margin": d.margin,
        "prompt_end": (item.text or text.decode(item.prompt))[-200:],
        "shared": shared,
        "a": text.decode(d.a, skip_special_tokens=False)[len(shared) :],
        "b": text.decode(d.b, skip_special_tokens=False)[len(shared) :],
    }


def _worst_tokens(found: Comparison, items: Sequence[Item], text: Text) -> list[Values]:
    """Forced tokens whose distributions are furthest apart."""
    table = found.table
    rows: NDArray[np.intp] = np.argsort(-table.kl, kind="stable")[:NUM_WORST] if len(table) else np.array([], dtype=int)
    return [
        {
            "item": items[table.cluster[row]].id,
            "context": int(table.context[row]),
            "decoded": bool(table.decoded[row]),
            "kl": float(table.kl[row]),
            "flip": bool(table.flip[row]),
            "margin": float(table.margin[row]),
            "before": _before(items[table.cluster[row]], int(table.context[row]), text),
        }
        for row in rows
    ]


def _before(item: Item, context: int, text: Text) -> str:
    ids = [*item.prompt, *item.continuation][:context]
    return text.decode(ids[-24:], skip_special_tokens=False)


def _jsonable(value: Any) -> Any:
    """The same without numbers that JSON can't hold."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
