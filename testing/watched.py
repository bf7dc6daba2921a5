"""An engine on the fake model that is checked after everything asked of it. It knows no policy and makes nothing up:
who calls it decides what happens, `testing/chance.py` by lot.

After each call: the blocks add up, every block holds what its owners believe it holds, nobody writes into a block that
somebody else reads, nobody is given a prefix that nobody with that salt has computed, every token is the oracle's, every
request ends once and for the right reason, and the counters say what happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from turnout.core.hooks import new_hooks
from turnout.core.interfaces import BlockManager, Preemption, Scheduler
from turnout.core.types import ContractError, Finish, Request, Sampling
from turnout.testing.asked import Asked, Listener, said_after
from turnout.testing.audit import audit, audit_stats, full_house, reachable
from turnout.testing.fake import make_engine
from turnout.testing.witness import Witness

PLACES = ("waiting", "swapped", "blocked", "running", "kept")


class Misstep(Exception):
    """What a scheduler raises to break its contract on purpose: the engine has to undo the step."""


class Clock:
    """Time that passes only when it is looked at, and when told to."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 1.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Watched:
    """The calls of an engine, and a few misfortunes: `fail`, `jump`. Raises AssertionError when something is wrong."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        blocks: BlockManager,
        preemption: Preemption,
        num_blocks: int = 64,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        tick: float = 0.001,
    ) -> None:
        self.clock, self._listener, hooks = Clock(tick), Listener(), new_hooks()
        hooks.register(self._listener)
        self.engine = make_engine(
            scheduler,
            blocks=blocks,
            preemption=preemption,
            num_blocks=num_blocks,
            block_size=blocks.block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            hooks=hooks,
            clock=self.clock,
        )
        self.witness = Witness(self.engine)
        self._open: dict[str, Asked] = {}
        self._all: list[Asked] = []
        self._fruitless = 0  # steps since somebody came further than ever
        self.met: Counter[str] = Counter()  # situations, for those who want to know whether they occur

    def add(
        self,
        rid: str,
        tokens: Sequence[int],
        *,
        max_tokens: int = 1,
        stop: Iterable[int] = (),
        prompt_logprobs: int | None = None,
        salt: str | None = None,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
        parent: str | None = None,
        keep: bool = False,
    ) -> bool:
        """Queue a request; False when the engine refuses it, as it must one that can't fit or whose id is in use."""
        engine = self.engine
        sampling = Sampling(0, max_tokens=max_tokens, stop_ids=frozenset(stop), prompt_logprobs=prompt_logprobs)
        request = Request(
            rid, list(tokens), sampling, priority=priority, labels=labels or {}, salt=salt, parent=parent, keep=keep
        )
        taken = rid in self._open or rid in engine._kept
        room = max(len(tokens) + max_tokens - 1, len(tokens))
        refusal = taken or parent == rid or room > engine.info.capacity
        try:
            engine.add(request)
        except ValueError as error:
            assert refusal, f"{rid} was refused: {error}"
            self._check()
            return False
        assert not refusal, f"{rid} was not refused"
        said = said_after(tuple(tokens), max_tokens)
        end = next((i + 1 for i, token in enumerate(said) if token in sampling.stop_ids), None)
        self._open[rid] = asked = Asked(request, said[:end], Finish.LENGTH if end is None else Finish.STOP)
        self._all.append(asked)
        self._check()
        return True

    def abort(self, rid: str) -> None:
        self.met[f"abort: {self._where(rid)}"] += 1
        self.engine.abort(rid)
        asked = self._open.pop(rid, None)
        if asked is not None:
            asked.finish = Finish.ABORT
            assert rid not in self.engine._kept, f"{rid} was aborted and is kept"
            audit_stats(self.engine, self.witness)
        self._check()

    def drop(self, rid: str) -> None:
        self.met[f"drop: {self._where(rid)}"] += 1
        kept = self.engine._kept.get(rid)
        self.engine.drop(rid)
        assert rid not in self.engine._kept, f"{rid} was dropped and is still kept"
        if kept:
            assert self._listener.dropped[-1] is kept, f"no plugin was told that {rid} was dropped"
            audit_stats(self.engine, self.witness)
        self._check()

    def fail(self, how: str = "before") -> None:
        """Let the next forward pass fail: "before" or "after" it was computed, or only the first token it samples:
        "one". Two in a row at most: a third would end the engine."""
        self.witness.fail = how

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._step()

    def drain(self) -> None:
        """Step until every request is finished. Kept ones stay."""
        while self.engine.busy:
            self._step()
        self._count()

    def finish(self) -> None:
        """Drain, drop what is kept, and look for anything left behind."""
        self.drain()
        engine = self.engine
        for rid in tuple(engine._kept):
            self.drop(rid)
        self.step()  # policies may clear up when they see who is gone
        stats = engine.stats
        assert stats.num_blocks_free == stats.num_blocks, f"{stats.num_blocks_free} of {stats.num_blocks} blocks free"
        assert stats.host_blocks_free == stats.host_blocks, f"{stats.host_blocks_free} of {stats.host_blocks} on host"
        left = reachable(engine, {asked.request.id for asked in self._all})
        assert not left, f"left behind at the end: {', '.join(left)}"
        full_house(engine)
        salts = {asked.request.salt for asked in self._all if asked.request.salt}
        left = [] if engine._sharing and engine._sharing.num_host_blocks else reachable(engine, salts)
        assert not left, f"no block has contents to be found, and left behind are {', '.join(left)}"

    def last(self, rid: str) -> Request:
        """The request that was last queued under this id."""
        return next(asked.request for asked in reversed(self._all) if asked.request.id == rid)

    def _step(self) -> None:
        witness, kept = self.witness, len(self.engine._kept)
        witness.begin()
        try:
            outputs = self.engine.step()
        except ContractError as error:
            if not isinstance(error.__cause__, Misstep):
                raise
            outputs = []
            self.met["step undone"] += 1
        else:
            self._listener.check_step(self.engine, witness.failed in ("before", "after"))
        assert not witness.faults, "; ".join(witness.faults)
        for output in outputs:
            asked = self._open.get(output.request_id)
            assert asked is not None, f"{output.request_id} gets an output, and is not open"
            asked.take(output, output.request_id in witness.doomed)
            if output.finish:
                del self._open[output.request_id]
                should = asked.request.keep and output.finish is not Finish.ERROR
                assert (output.request_id in self.engine._kept) is should, f"{output.request_id} is kept: {not should}"
        if len(self.engine._kept) < kept:
            self.met["kept given up"] += 1  # for want of blocks
        if witness.failed:
            self.met[f"failed: {witness.failed}"] += 1
        spared = [rid for rid in witness.doomed if rid in self._open]
        assert not spared, f"{', '.join(spared)} should have ended with an error"
        self._fruitless = 0 if witness.progress or not self.engine.busy else self._fruitless + 1
        work = sum(len(a.request.tokens) + a.request.sampling.max_tokens for a in self._open.values())
        assert self._fruitless <= 60 + 2 * work, (
            f"for {self._fruitless} steps nobody came further; open: {', '.join(self._open)}"
        )
        self._check()
        audit_stats(self.engine, self.witness)

    def ids(self, where: str) -> list[str]:
        """Of the requests that are "waiting", "swapped", "blocked", "running" or "kept"."""
        engine = self.engine
        if where in ("waiting", "swapped"):
            return [rid for rid, r in engine._waiting.items() if bool(r.host_blocks) is (where == "swapped")]
        return list({"running": engine._running, "blocked": engine._blocked_on_parent, "kept": engine._kept}[where])

    def _where(self, rid: str) -> str:
        return next((place for place in PLACES if rid in self.ids(place)), "gone")

    def _check(self) -> None:
        engine = self.engine
        audit(engine, self.witness)
        queued = [request.id for request in (*engine.waiting, *engine.running)]
        assert len(queued) == len(self._open), f"{sorted(queued)} are queued, {sorted(self._open)} are open"
        for asked in self._open.values():
            request = asked.request
            assert request.tokens[request.num_prompt :] == asked.got, f"{request.id} holds other tokens than it gave"
            assert request.finish is None, f"{request.id} is open and marked as ended"

    def _count(self) -> None:
        """What was counted is what happened."""
        stats = self.engine.stats
        ended = [asked for asked in self._all if asked.finish]
        assert all(asked.request.finish is asked.finish for asked in ended), "a request's end was marked wrong"
        listener = self._listener
        assert listener.added == [asked.request for asked in self._all], "plugins were not told once of each request"
        assert sorted(map(id, listener.finished)) == sorted(id(a.request) for a in ended), "nor once of the end of each"
        counted = Counter(asked.finish.value for asked in ended if asked.finish)
        assert stats.finished == counted, f"finished are {dict(counted)}, counted {stats.finished}"
        admitted = [asked.request for asked in self._all if asked.request.scheduled_at is not None]
        admitted = [r for r in admitted if r.parent is None or not r.num_cached]  # else the parent's prompt counted
        assert stats.prompt_tokens == sum(r.num_prompt for r in admitted), "prompt tokens are counted wrong"
        assert stats.cached_tokens == sum(r.num_cached for r in admitted), "cached tokens are counted wrong"
        self.met["child of a shared prefix"] = sum(
            1 for r in (a.request for a in self._all) if r.parent and r.num_cached
        )
        given = sum(len(asked.got) for asked in self._all)
        assert stats.generated_tokens == given, f"{given} tokens were given, {stats.generated_tokens} counted"
        for name, count in self.witness.counted.items():
            assert self.witness.counters[name] == count, f"{name} is {self.witness.counters[name]}, should be {count}"
        sent_back = sum(asked.request.num_preemptions for asked in self._all)
        assert stats.preemptions_recompute + stats.preemptions_swap == sent_back, "preemptions are counted wrong"
