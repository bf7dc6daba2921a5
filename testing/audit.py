"""What must hold of an engine on the fake model between two calls, and within a step. It looks into the engine and the
fake runner's memory, never into a block manager: any that keeps the contract passes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from turnout.core.engine import Engine
from turnout.core.interfaces import SharingBlocks
from turnout.core.types import Chunk, Request, Result, Stats, Step
from turnout.testing.fake import TokenCacheRunner, check_balance

GAUGES = {  # of Stats; everything else only grows
    "num_running",
    "num_waiting",
    "num_swapped",
    "num_blocks",
    "num_blocks_free",
    "host_blocks",
    "host_blocks_free",
    "step_tokens",
    "step_seconds",
    "schedule_seconds",
}
_PLAIN = (int, float, bytes, type(None), type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


@dataclass
class Ledger:
    """What was seen so far."""

    computed: set[tuple[str | None, bytes]] = field(default_factory=set)  # (salt, prefix) of all that was computed
    counters: dict[str, float] = field(default_factory=dict)


class WatchedRunner:
    """Stands before the engine's runner, sees every step, and fails when it is told to."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        inner = engine._runner
        assert isinstance(inner, TokenCacheRunner)
        self.inner, self.engine, self.ledger = inner, engine, ledger
        self.fail: str | None = None
        self.moved: Counter[str] = Counter()  # blocks, by the counter that should say so
        self._failed_in_a_row = 0
        engine._runner = self
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        self.faults: list[str] = []  # the engine takes an exception of the runner for a failed step
        self.doomed: set[str] = set()  # requests that end with an error
        self.progress = False
        self.failed: str | None = None  # how

    def run(self, step: Step) -> Result:
        self.faults += _step_faults(self.engine, self.ledger, step)
        self.progress = any(chunk.end > chunk.request.furthest for chunk in step.chunks)
        how, self.fail = self.fail, None
        if how in ("before", "after") and self._failed_in_a_row < 2:
            self._failed_in_a_row += 1
            self.failed = how
            self.doomed = {chunk.request.id for chunk in step.chunks}
            self.progress = True  # somebody ends
            if how == "after":
                self.inner.run(step)
            raise RuntimeError(f"failed {how} it was computed")
        self._failed_in_a_row = 0
        result = self._computed(step)
        sampling = [chunk.request.id for chunk in step.chunks if chunk.samples]
        if how == "one" and sampling:
            self.doomed, self.failed = {sampling[0]}, how
            return result._replace(errors={0: "failed alone"})
        return result

    def _computed(self, step: Step) -> Result:
        try:
            result = self.inner.run(step)
        except Exception as error:
            self.faults.append(f"the step can't be computed: {type(error).__name__}: {error}")
            raise
        first = (
            self.engine._swapper.num_blocks
        )  # the block manager's host blocks lie behind those for preempted requests
        swapped_in = sum(move.source < first for move in step.swap_in)
        self.moved["swapped_blocks_in"] += swapped_in
        self.moved["blocks.tier_in"] += len(step.swap_in) - swapped_in
        self.moved["blocks.tier_out"] += sum(move.target >= first for move in step.swap_out)
        self.moved["blocks.copied"] += len(step.copies)
        for request, start, count, _ in step.chunks:
            prefix = array("i", request.tokens[: start + count]).tobytes()
            self.ledger.computed.update(
                (request.salt, prefix[: 4 * end]) for end in range(start + 1, start + count + 1)
            )
        return result


def _step_faults(engine: Engine, ledger: Ledger, step: Step) -> Iterator[str]:
    """What is wrong with a step before it is computed."""
    info, size = engine.info, engine.info.block_size
    if step.num_tokens > info.max_num_batched_tokens:
        yield f"the step has {step.num_tokens} tokens, the budget is {info.max_num_batched_tokens}"
    owners = _owners(engine)
    for chunk in step.chunks:
        request = chunk.request
        if chunk.start != request.num_computed or chunk.num_tokens < 1 or chunk.end > len(request.tokens):
            yield f"{request.id} has {request.num_computed} of {len(request.tokens)} computed and gets {_span(chunk)}"
        if chunk.start and (request.salt, array("i", request.tokens[: chunk.start]).tobytes()) not in ledger.computed:
            yield f"{request.id} starts at {chunk.start}, and nobody with its salt computed what comes before"
        for block in request.blocks[chunk.start // size : -(-chunk.end // size)]:
            others = [rid for rid in owners.get(block, ()) if rid != request.id]
            if others:
                yield f"{request.id} writes into block {block}, which {', '.join(others)} holds too"


def _span(chunk: Chunk) -> str:
    return f"{chunk.start} to {chunk.end}"


def _owners(engine: Engine) -> Mapping[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for request in (*engine.running, *engine.waiting, *engine._kept.values()):
        for block in request.blocks:
            owners.setdefault(block, []).append(request.id)
    return owners


def audit(engine: Engine, runner: TokenCacheRunner) -> None:
    """Raises AssertionError when the books or the memory are wrong between two calls of the engine."""
    check_balance(engine)
    for request in (*engine.running, *engine._kept.values()):
        _holds(request, runner.cache[list(request.blocks)].ravel().tolist(), "its blocks hold")
    for request in engine.waiting:
        if request.host_blocks:
            assert request.num_computed, f"{request.id} lies in host memory with nothing computed"
            _holds(request, runner.host[request.host_blocks].ravel().tolist(), "host memory holds")
        else:
            assert request.num_computed == 0, f"{request.id} waits with {request.num_computed} tokens computed"
    free = engine._swapper._free
    used = [block for request in engine.waiting for block in request.host_blocks]
    assert sorted(free + used) == list(range(engine.stats.host_blocks)), f"host blocks: {free} free, {used} used"
    assert len(engine.running) <= engine.info.max_num_seqs, f"{len(engine.running)} run at once"


def _holds(request: Request, held: list[int], where: str) -> None:
    count = request.num_computed
    assert count <= len(request.tokens), f"{request.id} computed {count} of {len(request.tokens)} tokens"
    assert held[:count] == request.tokens[:count], f"{request.id}: {where} {held[:count]}, not {request.tokens[:count]}"


def audit_stats(engine: Engine, ledger: Ledger) -> None:
    """Raises AssertionError when a gauge is wrong, or a counter fell. Every call but `add` sets them."""
    stats, waiting = engine.stats, engine.waiting
    gauges = len(waiting), len(engine.running), sum(bool(r.host_blocks) for r in waiting), engine._blocks.num_free
    shown = stats.num_waiting, stats.num_running, stats.num_swapped, stats.num_blocks_free
    assert shown == gauges, f"waiting, running, swapped and free are {gauges}, shown as {shown}"
    before, ledger.counters = ledger.counters, counters(stats)
    for name, value in ledger.counters.items():
        assert value >= before.get(name, 0), f"the counter {name} fell from {before.get(name, 0)} to {value}"
    assert stats.swapped_blocks_in <= stats.swapped_blocks_out, "more blocks came back from host memory than went there"


def counters(stats: Stats) -> dict[str, float]:
    """All counters by name, those of the block manager too."""
    found = {name: getattr(stats, name) for name in Stats.__slots__ if name not in GAUGES | {"blocks", "finished"}}
    return found | {f"blocks.{name}": getattr(stats.blocks, name) for name in type(stats.blocks).__slots__}


def full_house(engine: Engine) -> None:
    """Raises AssertionError unless the idle engine's block manager can hand out every block once, and none twice."""
    manager, everything = engine._blocks, list(range(engine.info.num_blocks))
    if isinstance(manager, SharingBlocks):
        manager.begin(engine._clock())
    request = Request("everything", [0] * engine.info.capacity)
    grown = manager.grow(request, engine.info.capacity)
    assert grown and sorted(request.blocks) == everything, f"all blocks at once are {sorted(request.blocks)}"
    assert manager.num_free == 0, f"{manager.num_free} blocks are free when all are taken"
    manager.release(request)
    if isinstance(manager, SharingBlocks):
        manager.moves()
        manager.settle(False)
    assert manager.num_free == len(everything), f"{manager.num_free} of {len(everything)} blocks come back"


def reachable(engine: Engine, ids: set[str]) -> list[str]:
    """Where requests, or their ids, are still held in the engine, its policies and its block manager."""
    found: list[str] = []
    seen: set[int] = set()

    def look(value: object, path: str) -> None:
        if isinstance(value, Request) or (isinstance(value, str) and value in ids):
            found.append(path)
        elif not isinstance(value, (str, *_PLAIN)) and id(value) not in seen:
            seen.add(id(value))
            for name, part in _parts(value):
                look(part, f"{path}{name}")

    for name, value in vars(engine).items():
        if name not in ("_runner", "_hooks", "_clock", "info"):
            look(value, name)
    return found


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((" key", key) for key in value)
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, Iterable):
        if not hasattr(value, "__next__"):  # looking would use an iterator up
            yield from (("[]", part) for part in value)
    elif not type(value).__module__.startswith(("torch", "numpy")):
        slots = (slot for base in type(value).__mro__ for slot in vars(base).get("__slots__", ()))
        names = {*getattr(value, "__dict__", ()), *slots}
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
