"""The comparison itself: A against A for the noise floor, A against each B on the same tokens, then a judgement.

    1. score   every side is made to say the same continuation of each prompt: cold with the prompt scored as well, then
               again in another order with what is cached. A does so once more: its own noise.
    2. write   every side continues each prompt freely, greedily and with seeded sampling.
    3. judge   prompt by prompt, B's differences less A's own, by measure and context length.

What two honest engines may differ in when they write freely follows from step 1: a greedy divergence counts only if it is
no near tie. Sampled writings are judged twice. By how surprising the tokens drawn are beside what the side's own
distribution makes one expect at that temperature: it is the same for both, whatever was drawn. And by whether the same
seed draws the same, as far as the distributions are so close that it must: each border between listed tokens moves at most
by their distance (Pinsker's inequality), so that many times the distance explains a difference. Where that explains nearly
all, it is not judged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from turnout.core.types import Sampling
from turnout.lab.compare.measures import Difference, Mark, Table, difference
from turnout.lab.compare.sides import Item, Observed, Side, SideError
from turnout.lab.compare.verdict import MIN_PROMPTS, Finding, Judging, Verdict, far_apart, judge
from turnout.lab.compare.writings import Divergence, counts, divergences, explained, surprise

EFFECTS: Mapping[str, Mapping[str, float]] = {  # dtype of the coarser side -> what matters, by measure
    "float32": {"kl": 1e-6, "flips": 1e-3, "greedy": 0.2, "sampled": 0.2, "surprise": 0.3},
    "float16": {"kl": 1e-4, "flips": 5e-3, "greedy": 0.2, "sampled": 0.2, "surprise": 0.3},
    "bfloat16": {"kl": 2e-3, "flips": 1e-2, "greedy": 0.2, "sampled": 0.2, "surprise": 0.3},
}
Decode = Callable[[Sequence[int]], str]
OnProgress = Callable[[str, float], None]  # (what is being done, share done)
NEAR_TIES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}  # nats, likewise


@dataclass(frozen=True)
class Settings:
    """How to compare. None: by the coarser side's dtype."""

    num_top: int = 20  # likeliest tokens listed
    near_tie: float | None = None  # nats; flips with a smaller margin are benign
    effects: Mapping[str, float] = field(default_factory=dict)  # by measure; the rest by dtype
    judging: Judging = field(default_factory=Judging)
    max_tokens: int = 32  # of continuations that are not given, and of free writing
    temperature: float = 0.8  # of the sampled writing
    seed: int = 0

    def of(self, a: Side, b: Side) -> tuple[float, dict[str, float]]:
        """The near-tie bound and the effects that hold between two sides."""
        order = ("bfloat16", "float16", "float32")
        kind = next((dtype for dtype in order if dtype in (a.dtype, b.dtype)), "float32")
        near_tie = NEAR_TIES[kind] if self.near_tie is None else self.near_tie
        return near_tie, {**EFFECTS[kind], **self.effects}


@dataclass(frozen=True)
class Comparison:
    """A against one B."""

    a: str
    b: str
    verdict: Verdict
    findings: list[Finding]
    table: Table  # A against B
    noise: Table  # A against A
    divergences: list[Divergence]
    own_divergences: list[Divergence]  # A against A
    near_tie: float
    effects: Mapping[str, float]
    answers: Mapping[str, tuple[bool, bool]]  # item -> (A right, B right), where there is something to check
    lengths: tuple[int, ...]  # tokens of each item's prompt; a row's cluster is the place in it


def prepare(a: Side, items: Sequence[Item], settings: Settings) -> list[Item]:
    """The items, each with a continuation: A's own greedy one where none was given."""
    missing = [item for item in items if not item.continuation]
    greedy = Sampling(0.0, max_tokens=settings.max_tokens)
    written = a.write(missing, {item.id: greedy for item in missing}, 1) if missing else {}
    return [replace(item, continuation=written[item.id].tokens) if item.id in written else item for item in items]


def observe(side: Side, items: Sequence[Item], settings: Settings, draws: str, *, repeat: int = 0) -> Observed:
    """Let a side do all its work. `repeat` changes the order of requests and nothing else."""
    dice = random.Random(settings.seed + repeat)
    orders = [dice.sample(list(items), len(items)) for _ in range(4)]
    greedy = {item.id: Sampling(0.0, max_tokens=settings.max_tokens) for item in items}
    sampled = {
        item.id: Sampling(settings.temperature, max_tokens=settings.max_tokens, seed=settings.seed + number)
        for number, item in enumerate(items)
    }
    return Observed(
        side.score(orders[0], settings.num_top, prompts=True),
        side.score(orders[1], settings.num_top, prompts=False),
        side.write(orders[2], greedy, settings.num_top),
        side.write(orders[3], sampled, settings.num_top) if side.draws and side.draws == draws else {},
    )


def compare(
    a: Side,
    others: Sequence[Side],
    items: Sequence[Item],
    settings: Settings,
    decode: Decode | None = None,
    on_progress: OnProgress = lambda stage, share: None,
) -> list[Comparison]:
    """Judge each of `others` against `a`. `decode` turns tokens to text, to check answers; None: they are not checked.

    Raises SideError when a side fails, ValueError for unusable items.
    """
    if not items:
        raise ValueError("there is nothing to compare on: the workload has no prompts")
    work = 3 + len(others)
    on_progress(f"{a.name} writes what all are made to say", 0.0)
    items = prepare(a, items, settings)
    on_progress(f"{a.name} answers", 1 / work)
    first = observe(a, items, settings, a.draws)
    on_progress(f"{a.name} answers again, for its own noise", 2 / work)
    again = observe(a, items, settings, a.draws, repeat=1)
    found = []
    for number, b in enumerate(others):
        on_progress(f"{b.name} answers", (3 + number) / work)
        other = observe(b, items, settings, a.draws, repeat=2)
        answers = (
            {i.id: (_right(i, first, decode), _right(i, other, decode)) for i in items if i.answer} if decode else {}
        )
        found.append(_compared(a, b, items, settings, (first, again, other), answers))
    return found


def _right(item: Item, observed: Observed, decode: Decode) -> bool:
    return (item.answer or "") in decode(observed.greedy[item.id].tokens)


def _compared(
    a: Side,
    b: Side,
    items: Sequence[Item],
    settings: Settings,
    observed: tuple[Observed, Observed, Observed],
    answers: Mapping[str, tuple[bool, bool]],
) -> Comparison:
    first, again, other = observed
    near_tie, effects = settings.of(a, b)
    noise, table = _table(items, first, again), _table(items, first, other)
    own, parted = divergences(items, first, again), divergences(items, first, other)
    excess = _excess(table, noise, near_tie)
    excess["greedy", "all"] = counts(parted, near_tie, False) - counts(own, near_tie, False)
    allowed = explained(table, len(items), settings.num_top, settings.max_tokens)
    if other.sampled and allowed.mean() < effects["sampled"] / 2:
        excess["sampled", "all"] = counts(parted, near_tie, True) - counts(own, near_tie, True) - allowed
    if other.sampled:
        hotter = surprise(items, other, settings.temperature) - surprise(items, again, settings.temperature)
        excess["surprise", "hotter"], excess["surprise", "colder"] = hotter, -hotter
    verdict, findings = judge(excess, effects, settings.judging)
    own_kl = noise.per_cluster(noise.kl)
    if (far := far_apart(table.per_cluster(table.kl) - own_kl, own_kl, effects["kl"])) is not None:
        verdict, findings = Verdict.DIFFERENT, [far, *findings]
    return Comparison(
        a.name,
        b.name,
        verdict,
        findings,
        table,
        noise,
        parted,
        own,
        near_tie,
        effects,
        answers,
        tuple(len(item.prompt) for item in items),
    )


def _table(items: Sequence[Item], a: Observed, b: Observed) -> Table:
    def rows() -> list[tuple[int, int, bool, Difference]]:
        found = []
        for number, item in enumerate(items):
            start = len(item.prompt)
            for context, decoded, mine, theirs in (
                (1, False, a.cold[item.id].prefill, b.cold[item.id].prefill),
                (start, True, a.cold[item.id].decode, b.cold[item.id].decode),
                (start, True, a.warm[item.id].decode, b.warm[item.id].decode),
            ):
                pairs = zip(_same_length(item, mine, theirs), theirs, strict=True)
                try:
                    found += [(number, context + i, decoded, difference(x, y)) for i, (x, y) in enumerate(pairs)]
                except ValueError as error:
                    raise SideError(f"{item.id}: {error}") from error
        return found

    return Table.of(rows())


def _same_length(item: Item, mine: list[Mark], theirs: list[Mark]) -> list[Mark]:
    if len(mine) != len(theirs):
        raise SideError(f"the sides scored {len(mine)} and {len(theirs)} tokens of {item.id}: they cut it differently")
    return mine


def _excess(table: Table, noise: Table, near_tie: float) -> dict[tuple[str, str], NDArray[np.float64]]:
    """(measure, bucket) -> per prompt, B's mean difference less A's own."""
    found = {}
    floors = noise.buckets(least=MIN_PROMPTS)
    for name, part in table.buckets(least=MIN_PROMPTS).items():
        for measure, of in (("kl", _kl), ("flips", lambda t: _real(t, near_tie))):
            found[measure, name] = part.per_cluster(of(part)) - floors[name].per_cluster(of(floors[name]))
    return found


def _kl(table: Table) -> NDArray[np.float64]:
    return table.kl


def _real(table: Table, near_tie: float) -> NDArray[np.float64]:
    return (table.flip & (table.margin >= near_tie)).astype(np.float64)
