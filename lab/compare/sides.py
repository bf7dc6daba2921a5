"""What can be compared: anything that scores forced tokens, continues prompts, and can be timed at it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from turnout.core.engine import Engine
from turnout.core.types import Finish, Output, Request, Sampling
from turnout.lab.compare.measures import Mark


@dataclass(frozen=True)
class Item:
    """One prompt with the tokens both sides are made to say after it."""

    id: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...] = ()
    text: str | None = None  # of the prompt, to be shown
    answer: str | None = None  # a right answer contains it; None: nothing to check


class Scored(NamedTuple):
    """What a side says of one item's tokens."""

    prefill: list[Mark]  # of the prompt's tokens but the first; empty when not asked for
    decode: list[Mark]  # of the continuation


class Written(NamedTuple):
    """What a side wrote on its own."""

    tokens: tuple[int, ...]
    marks: list[Mark]  # one a token


class Observed(NamedTuple):
    """Everything one side said."""

    cold: dict[str, Scored]
    warm: dict[str, Scored]
    greedy: dict[str, Written]
    sampled: dict[str, Written]


@dataclass
class Speed:
    """One run over a set of prompts."""

    seconds: float = 0.0
    num_tokens: int = 0  # generated
    ttft: list[float] = field(default_factory=list)  # seconds
    itl: list[float] = field(default_factory=list)  # seconds


class Side(Protocol):
    """One of the things compared. Every method raises SideError when it can't answer."""

    name: str
    dtype: str  # "float32", ...; the coarsest of both sides sets the default effects; "": unknown
    draws: str  # whose random numbers a seed stands for; sampled writings are compared where both sides have the same
    origin: Mapping[str, object]  # composition, versions, fingerprint: stamped on results

    def score(self, items: Sequence[Item], num_top: int, *, prompts: bool) -> dict[str, Scored]:
        """The marks of each item's forced tokens; those of its prompt too if `prompts`. The order of `items` is the order
        they are sent in."""
        ...

    def write(self, items: Sequence[Item], samplings: Mapping[str, Sampling], num_top: int) -> dict[str, Written]:
        """What comes after each prompt under its sampling."""
        ...

    def race(self, items: Sequence[Item], max_tokens: int) -> Speed:
        """All prompts at once, greedy, each to exactly `max_tokens` tokens."""
        ...


class SideError(Exception):
    """A side could not do its part; the message says which and why."""


class EngineSide:
    """A composed engine in this process."""

    draws = "turnout"

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.dtype, self._engine, self._runs = name, engine.info.dtype, engine, 0
        info = engine.info
        self.origin: Mapping[str, object] = {
            "kind": "engine",
            "fingerprint": info.fingerprint,
            "model": info.model,
            "dtype": info.dtype,
            "device": info.device,
            "composition": info.composition,
            "plugins": info.plugins,
            "versions": info.versions,
            "notes": info.notes,
        }

    def score(self, items: Sequence[Item], num_top: int, *, prompts: bool) -> dict[str, Scored]:
        top = min(num_top, self._engine.info.vocab_size)
        sampling = Sampling(0.0, logprobs=top, prompt_logprobs=top if prompts else None)
        requests = [
            self._request(i, replace(sampling, forced=i.continuation, max_tokens=len(i.continuation))) for i in items
        ]
        found = {item.id: Scored([], []) for item in items}
        for rid, output in self._outputs(requests):
            found[rid].prefill.extend(Mark(p.token, p.logprob, p.top) for p in output.prompt_logprobs)
            found[rid].decode.extend(Mark(p.token, p.logprob, p.top) for p in output.logprobs)
        return found

    def write(self, items: Sequence[Item], samplings: Mapping[str, Sampling], num_top: int) -> dict[str, Written]:
        top = min(num_top, self._engine.info.vocab_size)
        requests = [self._request(item, replace(samplings[item.id], logprobs=top)) for item in items]
        tokens: dict[str, list[int]] = {item.id: [] for item in items}
        marks: dict[str, list[Mark]] = {item.id: [] for item in items}
        for rid, output in self._outputs(requests):
            tokens[rid] += output.tokens
            marks[rid] += [Mark(p.token, p.logprob, p.top) for p in output.logprobs]
        return {rid: Written(tuple(tokens[rid]), marks[rid]) for rid in tokens}

    def race(self, items: Sequence[Item], max_tokens: int) -> Speed:
        salt = f"race {self._runs}"  # every race starts cold
        requests = [self._request(item, Sampling(0.0, max_tokens=max_tokens), salt) for item in items]
        speed = Speed()
        seen: dict[str, float] = {}  # when the last token came
        began = time.perf_counter()
        for rid, output in self._outputs(requests):
            now = time.perf_counter()
            for _ in output.tokens:
                (speed.itl if rid in seen else speed.ttft).append(now - seen.get(rid, began))
                seen[rid] = now
            speed.num_tokens += len(output.tokens)
        speed.seconds = time.perf_counter() - began
        return speed

    def _request(self, item: Item, sampling: Sampling, salt: str | None = None) -> Request:
        self._runs += 1
        return Request(f"{item.id}#{self._runs}", list(item.prompt), sampling, salt=salt)

    def _outputs(self, requests: Sequence[Request]) -> Iterator[tuple[str, Output]]:
        """Every output with its item's id."""
        try:
            for output in self._engine.generate(requests):
                rid = output.request_id.rpartition("#")[0]
                if output.finish is Finish.ERROR:
                    raise SideError(f"{self.name} failed on {rid}: {output.error}")
                yield rid, output
        except ValueError as error:
            raise SideError(f"{self.name} refused a request: {error}") from error
