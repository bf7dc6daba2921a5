"""What must hold of an engine on the fake model between two calls. It looks into the engine and the fake runner's memory,
never into a block manager: any that keeps the contract passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

from turnout.core.engine import Engine
from turnout.core.optional import SharingBlocks
from turnout.core.types import Request, RequestView, Stats
from turnout.testing.fake import check_balance
from turnout.testing.witness import Witness

GAUGES = {  # of Stats; everything else only grows
    "num_running",
    "num_waiting",
    "num_swapped",
    "num_compiling",
    "num_blocks",
    "num_blocks_free",
    "host_blocks",
    "host_blocks_free",
    "step_tokens",
    "step_seconds",
    "schedule_seconds",
}
_PLAIN = (int, float, bytes, type(None), type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def audit(engine: Engine, witness: Witness) -> None:
    """Raises AssertionError when the books or the memory are wrong between two calls of the engine."""
    check_balance(engine)
    for request in (*engine.running, *engine._kept.values()):
        _hold(request, list(request.blocks), witness.inner.cache, witness.contexts.cache, witness, "its blocks hold")
    for request in engine.waiting:
        if request.host_blocks:
            assert request.num_computed, f"{request.id} lies in host memory with nothing computed"
            _hold(request, request.host_blocks, witness.inner.host, witness.contexts.host, witness, "host memory holds")
        else:
            assert request.num_computed == 0, f"{request.id} waits with {request.num_computed} tokens computed"
    free = engine._swapper._free
    used = [block for request in engine.waiting for block in request.host_blocks]
    assert sorted(free + used) == list(range(engine.stats.host_blocks)), f"host blocks: {free} free, {used} used"
    assert len(engine.running) <= engine.info.max_num_seqs, f"{len(engine.running)} run at once"


def _hold(
    request: Request, blocks: list[int], tokens: np.ndarray, contexts: np.ndarray, witness: Witness, where: str
) -> None:
    """The blocks hold the request's tokens, each computed behind those before it."""
    count = request.num_computed
    assert count <= len(request.tokens), f"{request.id} computed {count} of {len(request.tokens)} tokens"
    held = tokens[blocks].ravel()[:count].tolist()
    assert held == request.tokens[:count], f"{request.id}: {where} {held}, not {request.tokens[:count]}"
    computed = contexts[blocks].ravel()[:count].tolist()
    assert computed == witness.contexts.of(request, count), f"{request.id}: {where} tokens computed behind others"


def audit_stats(engine: Engine, witness: Witness) -> None:
    """Raises AssertionError when a gauge is wrong, or a counter fell. Every call but `add` sets them."""
    stats, waiting = engine.stats, engine.waiting
    gauges = len(waiting), len(engine.running), sum(bool(r.host_blocks) for r in waiting), engine._blocks.num_free
    shown = stats.num_waiting, stats.num_running, stats.num_swapped, stats.num_blocks_free
    assert shown == gauges, f"waiting, running, swapped and free are {gauges}, shown as {shown}"
    before, witness.counters = witness.counters, counters(stats)
    for name, value in witness.counters.items():
        assert value >= before.get(name, 0), f"the counter {name} fell from {before.get(name, 0)} to {value}"
    assert stats.swapped_blocks_in <= stats.swapped_blocks_out, "more blocks came back from host memory than went there"


def counters(stats: Stats) -> dict[str, float]:
    """All counters by name, those of the block manager too."""
    found = {
        name: getattr(stats, name)
        for name in Stats.__slots__
        if name not in GAUGES | {"blocks", "grammars", "finished"}
    }
    return found | {f"blocks.{name}": getattr(stats.blocks, name) for name in type(stats.blocks).__slots__}


def full_house(engine: Engine) -> None:
    """Raises AssertionError unless the idle engine's block manager can hand out every block once, and none twice. What it
    knew of their contents is forgotten then, but for a host tier."""
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
        if isinstance(value, (Request, RequestView)) or (isinstance(value, str) and value in ids):
            found.append(path)
        elif not isinstance(value, (str, *_PLAIN)) and id(value) not in seen:
            seen.add(id(value))
            for name, part in _parts(value):
                look(part, f"{path}{name}")

    for name, value in vars(engine).items():
        if name not in ("_runner", "_notifier", "_clock", "info"):
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
