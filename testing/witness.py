"""Stands between an engine and the fake runner: sees every step, remembers what was computed, and fails when it is told to.
It looks for what is wrong in a step; what must hold between two calls is in `testing/audit.py`.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Iterator

import numpy as np

from turnout.core.engine import Engine
from turnout.core.types import Request, Result, Step
from turnout.testing.fake import TokenCacheRunner, move_blocks


class Contexts:
    """For each slot, a checksum of all that was before the token in it, salt included: keys and values depend on that,
    and the fake runner's slots hold tokens alone."""

    def __init__(self, runner: TokenCacheRunner) -> None:
        self.cache = np.zeros(runner.cache.shape, dtype=np.uint32)
        self.host = np.zeros(runner.host.shape, dtype=np.uint32)
        self._sums: dict[Request, list[int]] = {}

    def of(self, request: Request, count: int) -> list[int]:
        """What the slots of its first `count` tokens should hold."""
        sums = self._sums.setdefault(request, [zlib.crc32(repr(request.salt).encode())])
        for token in request.tokens[len(sums) - 1 : count]:
            sums.append(zlib.crc32(token.to_bytes(4, "little"), sums[-1]))
        return sums[1 : count + 1]

    def run(self, step: Step) -> None:
        move_blocks(step, self.cache, self.host)
        size = self.cache.shape[1]
        for request, start, count, _ in step.chunks:
            for position, value in enumerate(self.of(request, start + count)[start:], start):
                self.cache[request.blocks[position // size], position % size] = value


class Witness:
    """A runner."""

    def __init__(self, engine: Engine) -> None:
        inner = engine._runner
        assert isinstance(inner, TokenCacheRunner)
        self.inner, self.engine, self.contexts = inner, engine, Contexts(inner)
        self.fail: str | None = None  # how the next step is to fail
        self.computed: set[tuple[str | None, bytes]] = set()  # (salt, prefix) of all that was computed
        self.counted: Counter[str] = Counter()  # what happened, by the counter that should say so
        self._peak: dict[Request, int] = {}
        self.counters: dict[str, float] = {}  # as they were last
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
        self.faults += self._wrong(step)
        self.progress = any(chunk.end > chunk.request.peak_computed for chunk in step.chunks)
        how, self.fail = self.fail, None
        if how in ("before", "after") and self._failed_in_a_row < 2:
            self._failed_in_a_row += 1
            self.failed, self.progress = how, True  # somebody ends
            self.doomed = {chunk.request.id for chunk in step.chunks}
            if how == "after":
                self._compute(step)
            raise RuntimeError(f"failed {how} it was computed")
        self._failed_in_a_row = 0
        result = self._compute(step)
        self._remember(step)
        sampling = [chunk.request.id for chunk in step.chunks if chunk.samples]
        if how == "one" and sampling:
            self.doomed, self.failed = {sampling[0]}, how
            return result._replace(errors={0: "failed alone"})
        return result

    def _compute(self, step: Step) -> Result:
        try:
            result = self.inner.run(step)
            self.contexts.run(step)
        except Exception as error:
            self.faults.append(f"the step can't be computed: {type(error).__name__}: {error}")
            raise
        return result

    def _remember(self, step: Step) -> None:
        first = self.engine._swapper.num_blocks  # the block manager's host blocks lie behind those for the preempted
        swapped_in = sum(move.source < first for move in step.swap_in)
        self.counted["swapped_blocks_in"] += swapped_in
        self.counted["blocks.tier_in"] += len(step.swap_in) - swapped_in
        self.counted["blocks.tier_out"] += sum(move.target >= first for move in step.swap_out)
        self.counted["blocks.copied"] += len(step.copies)
        for request, start, count, _ in step.chunks:
            again = min(self._peak.get(request, 0), start + count) - start
            self.counted["recomputed_tokens"] += max(again, 0)
            self._peak[request] = max(self._peak.get(request, 0), start + count)
            tokens = _bytes(request, start + count)
            self.computed.update((request.salt, tokens[: 4 * end]) for end in range(start + 1, start + count + 1))

    def _wrong(self, step: Step) -> Iterator[str]:
        """What is wrong with a step before it is computed."""
        info, size = self.engine.info, self.engine.info.block_size
        if step.num_tokens > info.max_num_batched_tokens:
            yield f"the step has {step.num_tokens} tokens, the budget is {info.max_num_batched_tokens}"
        owners = self._owners()
        for request, start, count, _ in step.chunks:
            if start != request.num_computed or count < 1 or start + count > len(request.tokens):
                yield f"{request.id} computed {request.num_computed} of {len(request.tokens)}, gets {count} from {start}"
            if start and (request.salt, _bytes(request, start)) not in self.computed:
                yield f"{request.id} starts at {start}, and nobody with its salt computed what comes before"
            for block in request.blocks[start // size : -(-(start + count) // size)]:
                if others := owners.get(block, set()) - {request.id}:
                    yield f"{request.id} writes into block {block}, which {', '.join(sorted(others))} holds too"

    def _owners(self) -> dict[int, set[str]]:
        owners: dict[int, set[str]] = {}
        for request in (*self.engine.running, *self.engine.waiting, *self.engine._kept.values()):
            for block in request.blocks:
                owners.setdefault(block, set()).add(request.id)
        return owners


def _bytes(request: Request, count: int) -> bytes:
    return array("i", request.tokens[:count]).tobytes()
