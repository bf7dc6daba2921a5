"""What may happen to an engine, by chance: strategies of hypothesis. An operation says *which* request by place ("the
third last"), so that any list of operations means something.
"""

from __future__ import annotations

import dataclasses
import random
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from itertools import combinations, product

from hypothesis import strategies as st

from turnout.testing.traces import FINISH, STEP, Call, Options, Part, Play, Setup

OPTIONS: Mapping[
    str, Sequence[object]
] = {  # by name, in any component; flags get both values, others keep their default
    "block_size": (1, 2, 3, 4, 8),
    "ageing": (None, 0.01, 5.0),
    "chunk": (1, 2, 3, 5),
    "eviction": ("lru", "lfu", "fifo", "priority"),
    "host_blocks": (0, 1, 3, 8, 20),
    "long_prefill_token_threshold": (0, 2, 5),
    "itl_target": (0.0001, 0.1),
    "max_pinned": (0.0, 0.3, 1.0),
    "max_prefill_tokens": (1, 3, 8),
    "max_wait": (0.01, 5.0),
    "min_copied": (0, 1, 2, 4),
    "seed": range(8),
    "target_itl": (None, 1e-6, 0.02, 0.5),
    "ttft_target": (0.001, 1.0),
    "ttl": (None, 0.01, 0.1, 5.0),
    "victim_rule": ("newest", "least_lost", "most_blocks", "lowest_priority"),
    "window": (1, 2, 128),
}
REQUEST_OPTIONS: Sequence[tuple[str, object]] = (
    ("keep", True),
    ("salt", "red"),
    ("salt", "blue"),
    ("priority", 1),
    ("priority", -1),
    ("labels", {"tenant": "ann"}),
    ("labels", {"tenant": "bob"}),
    ("labels", {"pin": "true"}),
    ("labels", {"pin": "1s", "ttft_target": "0.01"}),
    ("labels", {"pin": "false", "itl_target": "0.001"}),
    ("prompt_logprobs", 0),
    ("stop", range(0, 997, 9)),  # a ninth of all tokens
)
Operation = Callable[[Play], None]


@dataclass(frozen=True)
class Add:
    """Requests: `shared` tokens of a text that all share, or of an earlier request, then some of their own."""

    shared: int
    own: tuple[int, ...]
    max_tokens: int
    options: Options
    like: int | None  # begin like this earlier request, what that generated included
    child: bool  # and are its children
    again: int | None  # the first takes the id of this earlier request
    count: int

    def __call__(self, play: Play) -> None:
        capacity = play.engine.engine.info.capacity
        base = None if self.like is None else play.pick(self.like)
        begin = range(1, self.shared + 1) if base is None else play.engine.last(base).tokens[: self.shared]
        tokens = [*begin, *self.own][:capacity] or [100]
        options = (("max_tokens", min(self.max_tokens, capacity - len(tokens) + 1)), *self.options)
        if self.child and base is not None:
            options += (("parent", base),)
        rid = None if self.again is None else play.pick(self.again)
        for _ in range(self.count):
            play.call(Call("add", (rid or play.new_id(), tokens), options))
            rid = None


@dataclass(frozen=True)
class Steps:
    count: int

    def __call__(self, play: Play) -> None:
        for _ in range(self.count):
            play.call(STEP)


@dataclass(frozen=True)
class About:
    """A call about one request, wherever it is or in one place."""

    name: str
    where: str | None = None  # "waiting", "swapped", "blocked", "running", "kept"
    which: int = 0

    def __call__(self, play: Play) -> None:
        ids = play.ids if self.where is None else play.engine.ids(self.where)
        if ids:
            play.call(Call(self.name, (ids[-1 - self.which % len(ids)],)))


@dataclass(frozen=True)
class Other:
    call: Call

    def __call__(self, play: Play) -> None:
        play.call(self.call)


ABORTS = ("waiting", "swapped", "swapped", "swapped", "blocked", "running")  # few are swapped out, and not for long
STEPS: list[Operation] = [Steps(count) for count in (1, 1, 2, 2, 3, 4, 5, 6)]
RARE: list[Operation] = [
    *(About("abort", where, which) for where in ABORTS for which in range(2)),
    *(About("drop", "kept", which) for which in range(3)),
    *(About(name, None, which) for name in ("abort", "drop") for which in range(2)),
    *(Other(Call("fail", (how,))) for how in ("before", "before", "after", "after", "one")),
    *(Other(Call("jump", (seconds,))) for seconds in (0.05, 60.0, 1e6)),
    Other(Call("drain")),
]


@cache
def operations() -> st.SearchStrategy[Operation]:
    """One draw each: drawing takes longer than playing what is drawn."""
    dice = random.Random(0)
    options = [(), (), *((one,) for one in REQUEST_OPTIONS)]
    options += [(a, b) for a, b in combinations(REQUEST_OPTIONS, 2) if a[0] != b[0]]
    like = [(None, False)] * 6 + [(which, child) for which in range(3) for child in (False, True, True)]
    more = [(None, 1)] * 6 + [(None, 2), (None, 4), (0, 1), (1, 1), (2, 2)]
    pool: list[Operation] = []
    for _ in range(2000):
        which, child = dice.choice(like)
        own = (100 + dice.randrange(3),) * dice.choice((0, 1, 1, 3) if child else range(9))  # one ends within a block
        max_tokens = dice.choice((0, 1, 2, 3, 6, 9, 14))
        add = Add(
            dice.choice((0, 0, *range(15))), own, max_tokens, dice.choice(options), which, child, *dice.choice(more)
        )
        pool += [add, dice.choice(STEPS), add, dice.choice(RARE) if dice.random() < 0.8 else STEPS[0]]
    return st.sampled_from(pool)


def happenings() -> st.SearchStrategy[Callable[[Play], None]]:
    """A few dozen operations, then an end that leaves nothing behind."""

    def happen(operations: Sequence[Operation], play: Play) -> None:
        for operation in operations:
            operation(play)
        play.call(FINISH)

    return st.lists(operations(), min_size=10, max_size=60).map(lambda drawn: partial(happen, drawn))


@cache
def variants(component: type) -> Sequence[Part]:
    """The component with each of its options, in all ways that go together."""
    hints = typing.get_type_hints(component)
    choices: dict[str, Sequence[object]] = {}
    for spec in dataclasses.fields(component):
        hint = hints[spec.name]
        if spec.name in OPTIONS:
            choices[spec.name] = OPTIONS[spec.name]
        elif hint is bool:
            choices[spec.name] = (False, True)
        elif isinstance(hint, type) and issubclass(hint, Enum):
            choices[spec.name] = tuple(hint)
    some = [tuple(zip(choices, values, strict=True)) for values in product(*choices.values())]
    return [Part(component, options) for options in some if _allowed(component, dict(options))]


def _allowed(component: type, options: Mapping[str, object]) -> bool:
    """Some options go together, some don't."""
    try:
        component(**options)
    except ValueError:
        return False
    return True


def setups(schedulers: Sequence[type], preemptions: Sequence[type], blocks: Sequence[type]) -> st.SearchStrategy[Setup]:
    """Compositions of these, with little room."""
    return st.builds(
        Setup,
        *(st.sampled_from(one).map(variants).flatmap(st.sampled_from) for one in (schedulers, preemptions, blocks)),
        num_blocks=st.sampled_from((2, 3, 4, 5, 6, 8, 12)),
        max_num_batched_tokens=st.sampled_from((64, 1, 2, 3, 5, 8, 16)),
        max_num_seqs=st.integers(1, 6),
        tick=st.sampled_from((0.001, 0.0, 0.1)),
    )
