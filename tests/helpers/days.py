"""Days to record: the fake model under chance. Requests come and are aborted, dropped and failed at any moment, time
jitters, blocks are short."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from turnout.core import Request, Sampling, Step
from turnout.core.engine import Engine
from turnout.core.hooks import Hooks, new_hooks
from turnout.core.model import Result, Runner
from turnout.lab.record.replay import component
from turnout.server.steplog.account import Account
from turnout.server.steplog.events import read
from turnout.server.steplog.record import Recorder
from turnout.server.steplog.why import follow, view
from turnout.testing import make_engine

PLAIN = {"scheduler": "fcfs", "preemption": "recompute", "blocks": "paged"}
OPTIONS: dict[str, dict[str, object]] = {
    "chunked_prefill": {"chunk": 5, "max_prefill_tokens": 9},
    "swap": {"host_blocks": 9},
}


def composed(**names: str) -> dict[str, object]:
    """As in the header of a recording."""
    small = {"blocks": {"block_size": 4}}
    return {
        slot: {"name": n, "options": small.get(slot, {}) | OPTIONS.get(n, {})} for slot, n in (PLAIN | names).items()
    }


class Jitter:
    """Time that passes unevenly, and whenever it is looked at."""

    def __init__(self, seed: int) -> None:
        self.now, self._dice = 100.0, random.Random(seed)

    def __call__(self) -> float:
        self.now += self._dice.expovariate(200.0)
        return self.now


class Faulty:
    """A runner whose steps fail now and then, wholly or for one request."""

    def __init__(self, runner: Runner, seed: int) -> None:
        self._runner, self._dice, self._failed = runner, random.Random(seed), False

    def run(self, step: Step) -> Result:
        luck = self._dice.random()
        self._failed = luck < 0.02 and not self._failed
        if self._failed:
            raise RuntimeError("the device is tired")
        result = self._runner.run(step)
        return result._replace(errors={0: "its logits are not finite"}) if luck > 0.97 and result.tokens else result


def engine_of(composition: Mapping[str, object], hooks: Hooks, seed: int = 0, **limits: int) -> tuple[Engine, Jitter]:
    """An engine on the fake model with the named policies, short of everything."""
    clock = Jitter(seed)
    parts = {slot: component(composition, slot) for slot in ("scheduler", "preemption", "blocks")}
    sizes = {"num_blocks": 16, "max_num_batched_tokens": 24, "max_num_seqs": 6} | limits
    engine = make_engine(**parts, hooks=hooks, clock=clock, **sizes)
    engine.info = replace(engine.info, composition=composition)
    return engine, clock


def live(engine: Engine, seed: int, num_requests: int = 40) -> None:
    """Let a day pass."""
    dice, added, kept = random.Random(seed), 0, []
    shared = [dice.randrange(900) for _ in range(17)]
    while added < num_requests or engine.busy:
        if added < num_requests and dice.random() < 0.4:
            for _ in range(min(dice.randrange(1, 5), num_requests - added)):
                request = _request(dice, f"r{added}", shared, kept)
                kept += [request] if request.keep else []
                engine.add(request)
                added += 1
        if dice.random() < 0.08 and added:
            engine.abort(f"r{dice.randrange(added)}")
        if dice.random() < 0.1 and kept:
            engine.drop(kept.pop(0).id)
        if engine.busy:
            engine.step()


def _request(dice: random.Random, name: str, shared: list[int], kept: list[Request]) -> Request:
    tokens = shared[: dice.randrange(18)] + [dice.randrange(900) for _ in range(dice.randrange(1, 14))]
    parent = dice.choice(kept) if kept and dice.random() < 0.4 else None
    if parent is not None:
        tokens = parent.tokens[: parent.num_prompt] + tokens[:2]
    sampling = Sampling(
        0,
        max_tokens=dice.choice((0, 1, 4, 9, 14)),
        stop_ids=frozenset(dice.sample(range(997), 40)),
        prompt_logprobs=dice.choice((None, None, None, 1)),
    )
    return Request(
        name,
        tokens,
        sampling,
        priority=dice.randrange(3),
        labels={"tenant": dice.choice("abc"), "request": f"client-{name}"},
        salt=None if parent is None else parent.salt if dice.random() < 0.9 else "other",
        parent=None if parent is None else parent.id,
        keep=parent is None and dice.random() < 0.3,
    )


def record_day(path: Path, seed: int = 0, limit: int = 2**30, **names: str) -> Engine:
    """A recorded day; the engine as it was at its end."""
    hooks = new_hooks()
    recorder = Recorder(str(path), limit)
    hooks.register(recorder)
    engine, recorder._clock = engine_of(composed(**names), hooks, seed)
    engine._runner = Faulty(engine._runner, seed)
    recorder.begin(engine.info)
    live(engine, seed)
    recorder.close()
    return engine


def accounts(path: Path) -> dict[str, dict[str, object]]:
    """Those of all requests of a recording, by id."""
    account = Account(num_ended=2**62, most_pieces=None)
    for _ in follow(read(path), account):
        pass
    return {name: view(account, record, account.now) for name, record in (account.ended | account.open).items()}
