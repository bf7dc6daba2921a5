"""Whether the points of a sweep still say the same, each against the first, judged as `turnout ab` judges.

What the first one said is remembered, so that no two engines are in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnout.core.engine import Engine
from turnout.core.types import Sampling
from turnout.lab.ab.workload import load
from turnout.lab.bench.config import Equality
from turnout.lab.compare.run import Settings, compare
from turnout.lab.compare.sides import EngineSide, Item, Scored, SideError, Speed, Written
from turnout.server.text.tokenizer import Text


class Remembered:
    """A side whose answers are kept: asked the same again, it needs no engine."""

    def __init__(self, side: EngineSide) -> None:
        self._side: EngineSide | None = side
        self.name, self.dtype, self.draws, self.origin = side.name, side.dtype, side.draws, side.origin
        self._calls = 0
        self._scored: dict[int, dict[str, Scored]] = {}
        self._written: dict[int, dict[str, Written]] = {}

    def rewind(self) -> None:
        """From the first call again, which must come in the same order."""
        self._calls = 0

    def forget_engine(self) -> None:
        self._side = None

    def score(self, items: Sequence[Item], num_top: int, *, prompts: bool) -> dict[str, Scored]:
        return self._once(self._scored, lambda side: side.score(items, num_top, prompts=prompts))

    def write(self, items: Sequence[Item], samplings: Mapping[str, Sampling], num_top: int) -> dict[str, Written]:
        return self._once(self._written, lambda side: side.write(items, samplings, num_top))

    def race(self, items: Sequence[Item], max_tokens: int) -> Speed:
        raise AssertionError("speed is measured by the benchmark itself")

    def _once(self, kept: dict[int, Any], ask: Callable[[EngineSide], Any]) -> Any:
        self._calls += 1
        if self._calls not in kept:
            assert self._side is not None, "the first composition is asked something new"
            kept[self._calls] = ask(self._side)
        return kept[self._calls]


class EqualityJudge:
    """Compares every engine it is shown with the first one."""

    def __init__(self, options: Equality, seed: int = 0) -> None:
        self._options, self._seed = options, seed
        self._first: Remembered | None = None
        self._items: list[Item] = []
        self._settings = Settings(max_tokens=options.max_tokens, seed=seed)

    def of(self, engine: Engine, name: str) -> dict[str, Any]:
        """The verdict, with what it rests on. Raises RuntimeError when an engine fails at it."""
        try:
            return self._of(engine, name)
        except SideError as error:
            raise RuntimeError(f"comparing answers: {error}") from error

    def _of(self, engine: Engine, name: str) -> dict[str, Any]:
        side = EngineSide(name, engine)
        if self._first is None:
            text = Text.load(engine.info.path)
            longest, options = min(engine.info.max_model_len, engine.info.capacity), self._options
            self._items = load(options.workload, text, options.num_prompts, longest, options.max_tokens, self._seed)
            self._first = Remembered(side)
            compare(self._first, [], self._items, self._settings)
            self._first.forget_engine()
            return {"verdict": "the baseline", "against": None}
        self._first.rewind()
        found = compare(self._first, [side], self._items, self._settings)[0]
        table = found.table
        return {
            "verdict": found.verdict.name.lower().replace("_", " "),
            "against": self._first.name,
            "kl_mean": float(table.kl.mean()),
            "kl_max": float(table.kl.max()),
            "flip_rate": float(table.flip.mean()),
            "num_tokens": len(table.kl),
            "num_prompts": len(self._items),
        }
