"""A model whose whole memory is the cache: the next token is a checksum of what the request's blocks hold.

A block shared too early, freed twice, swapped to the wrong place or left stale changes the tokens, so equality with
`continuation`, which has no cache at all, proves scheduler, draft, block manager and preemption together, in
microseconds and without a device.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from turnout.compose.plugins import load
from turnout.core.draft import Draft
from turnout.core.engine import Engine
from turnout.core.hooks import Hooks, new_hooks
from turnout.core.interfaces import BlockManager, Preemption, Scheduler
from turnout.core.model import Runner
from turnout.core.optional import AsyncRunner, SharingBlocks
from turnout.core.pipelined import PipelinedEngine
from turnout.core.structured import Structured
from turnout.core.types import EngineInfo, Limits, Logprobs, PreemptMode, Request, RequestView, Result, Step

VOCAB = 997


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("i", tokens).tobytes()) % VOCAB


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the fake model says after `prompt`, without any cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def fitting(token: int, bits: Tensor) -> int:
    """The first token from this one on that a row of bits allows."""
    allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


class TokenCacheRunner:
    """Stores each token in its slot; samples from what the slots hold."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.cache = np.full((num_blocks, block_size), -1, dtype=np.int32)
        self.host = np.full((num_host_blocks, block_size), -2, dtype=np.int32)
        self.steps: list[Step] = []

    def run(self, step: Step) -> Result:
        self.steps.append(step)
        move_blocks(step, self.cache, self.host)
        size = self.cache.shape[1]
        for request, start, count, _ in step.chunks:
            for position in range(start, start + count):
                self.cache[request.blocks[position // size], position % size] = request.tokens[position]
        tokens, scores = [], {}
        for chunk in step.chunks:
            request = chunk.request
            held = self.cache[np.array(request.blocks)].ravel()
            if chunk.samples:
                tokens.append(next_token(held[: chunk.end].tolist()))
            if request.sampling.prompt_logprobs is not None:
                first, end = max(chunk.start, request.num_scored), min(chunk.end, request.num_prompt - 1)
                found = [
                    Logprobs(int(held[p + 1]) if p + 1 < chunk.end else request.tokens[p + 1], -1.0, 1)
                    for p in range(first, end)
                ]
                scores[request.id] = found
        if step.constraint is not None:
            for row, bits in zip(step.constraint.rows, step.constraint.fill(), strict=True):
                tokens[row] = fitting(tokens[row], bits)
            step.constraint.take(tokens)
        return Result(tokens, scores=scores)


def move_blocks(step: Step, cache: np.ndarray, host: np.ndarray) -> None:
    """Do the step's moves, in their order, between two arrays whose first dimension is the block."""
    for move in step.swap_out:
        host[move.target] = cache[move.source]
    copied = [(move.target, cache[move.source].copy()) for move in step.copies]
    for target, held in copied:
        cache[target] = held
    for move in step.swap_in:
        cache[move.target] = host[move.source]


class _Recompute:
    num_host_blocks = 0

    def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        return candidates[-1]

    def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
        return PreemptMode.RECOMPUTE


def make_engine(
    scheduler: Scheduler,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int = 10_000,
    blocks: BlockManager | None = None,
    preemption: Preemption | None = None,
    hooks: Hooks | None = None,
    structured: Structured | None = None,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
    runner: Callable[[int, int, int], Runner] = TokenCacheRunner,
) -> Engine:
    """An engine on the fake model; `runner` makes it from the numbers of blocks, of slots in one, and of host blocks."""
    policy = preemption or _Recompute()
    info = EngineInfo(
        model="fake",
        path="",
        architecture="fake",
        dtype="int32",
        device="cpu",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        capacity=num_blocks * block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        fingerprint="fp_fake",
        composition={},
        plugins={},
        versions={},
    )
    manager = blocks or _default_blocks(block_size)
    num_host = policy.num_host_blocks + (manager.num_host_blocks if isinstance(manager, SharingBlocks) else 0)
    made = runner(num_blocks, block_size, num_host)
    engine = PipelinedEngine if isinstance(made, AsyncRunner) else Engine
    return engine(
        made,
        scheduler,
        manager,
        policy,
        info,
        hooks=hooks or new_hooks(),
        structured=structured,
        limits=limits,
        clock=clock,
    )


def check_balance(engine: Engine) -> None:
    """Every block is free or held; every request holds what its progress needs; host memory likewise.

    Raises AssertionError saying which count is off.
    """
    manager, stats = engine._blocks, engine.stats
    owners = (*engine.running, *engine.waiting, *engine._kept.values())
    held = {block for request in owners for block in request.blocks}
    assert len(held) + manager.num_free == engine.info.num_blocks, (
        f"{len(held)} blocks held + {manager.num_free} free are not {engine.info.num_blocks}"
    )
    for request in engine.waiting:
        assert not request.blocks, f"{request.id} waits and holds blocks"
    for request in engine.running:
        slots = len(request.blocks) * engine.info.block_size
        assert request.num_computed <= slots, f"{request.id} computed {request.num_computed} in {slots} slots"
        assert len(set(request.blocks)) == len(request.blocks), f"{request.id} holds a block twice"
        assert not request.host_blocks, f"{request.id} runs and lies in host memory"
    swapped = [block for request in engine.waiting for block in request.host_blocks]
    assert len(set(swapped)) == len(swapped), "two requests share a host block"
    assert len(swapped) + stats.host_blocks_free == stats.host_blocks, "host blocks do not add up"


def serve_all(engine: Engine, requests: Sequence[Request], max_steps: int = 20_000) -> dict[str, list[int]]:
    """Run the requests to their end, checking the balance after every step. Returns the tokens of each."""
    got: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(max_steps):
        if not engine.busy:
            return got
        for output in engine.step():
            got[output.request_id] += output.tokens
        check_balance(engine)
    raise AssertionError(f"{len(engine.running)} running and {len(engine.waiting)} waiting after {max_steps} steps")


def _default_blocks(block_size: int) -> BlockManager:
    """The block manager that is served by default, found where every other one is."""
    manager: BlockManager = load().get("blocks", "paged").component(block_size)
    return manager
