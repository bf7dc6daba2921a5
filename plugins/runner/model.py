"""Turns a step into tensors, runs the model, samples. It owns the model and the caches and knows no queue.

Requests lie end to end, without padding:

    tokens       a0 a1 a2 a3 | b7 | c0 c1          a: first chunk, b: a decode at position 7, c: another prompt
    query_start  0             4    5       7
    kv_lens      4, 8, 2                            keys each attends to, this step's included
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnout.core import AttentionBackend, Batch, Chunk, KVSpec, Logprobs, Model, Move, Result, Step
from turnout.plugins.runner.sampler import sample, score


@dataclass
class LocalRunner:
    """Runs steps in this process, on one device."""

    def start(
        self,
        model: Model,
        attention: AttentionBackend[Any, Any],
        spec: KVSpec,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int,
    ) -> None:
        self._model, self._attention, self._spec, self._device = model, attention, spec, device
        self._caches = attention.allocate(spec, dtype, device)
        self._groups = {layer: index for index, layer in enumerate(dict.fromkeys(spec.layers))}
        self._group_of = [self._groups[layer] for layer in spec.layers]
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda" and num_host_blocks:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._host = [_like_on_host(t, num_host_blocks) for t in self._tensors()] if num_host_blocks else []

    @torch.inference_mode()
    def run(self, step: Step) -> Result:
        """Moves first, then one forward pass over all chunks."""
        self._move(step.swap_out, step.copies, step.swap_in)
        if not step.chunks:
            return Result([])
        batch, sampled, scored = self._batch(step.chunks)
        plans = [self._attention.plan(batch, layer, self._spec.block_size) for layer in self._groups]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            return self._attention.run(q, k, v, self._caches[layer], plans[self._group_of[layer]], sinks)

        logits = self._model(batch.tokens, batch.positions, batch.logit_rows, attend)
        tokens, logprobs, errors = sample(logits[: len(sampled)], [c.request for c in sampled])
        return Result(tokens, logprobs, errors, _scores(logits, len(sampled), scored))

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[Batch, list[Chunk], list[tuple[Chunk, int, int]]]:
        """The step as tensors, the chunks that sample, and (chunk, first, last + 1 position) to score."""
        tokens, blocks = array("q"), array("i")
        counts, starts, widths = [], [], []
        sampled: list[Chunk] = []
        rows: list[int] = []
        scored: list[tuple[Chunk, int, int]] = []
        score_rows: list[int] = []
        for chunk in chunks:
            request, start, count, samples = chunk
            if count == 1:
                tokens.append(request.tokens[start])
            else:
                tokens.extend(request.tokens[start : start + count])
            counts.append(count)
            starts.append(start)
            blocks.extend(request.blocks)
            widths.append(len(request.blocks))
            if samples:
                sampled.append(chunk)
                rows.append(len(tokens) - 1)
            if request.sampling.prompt_logprobs is not None:
                first, end = max(start, request.num_scored), min(start + count, request.num_prompt - 1)
                if first < end:
                    scored.append((chunk, first, end))
                    offset = len(tokens) - count - start
                    score_rows += range(first + offset, end + offset)
        batch = self._tensors_of(tokens, blocks, counts, starts, widths, rows + score_rows)
        return batch, sampled, scored

    def _tensors_of(
        self,
        tokens: array[int],
        blocks: array[int],
        counts: list[int],
        starts: list[int],
        widths: list[int],
        rows: list[int],
    ) -> Batch:
        size = self._spec.block_size
        count, start, width = (np.array(values, dtype=np.int64) for values in (counts, starts, widths))
        table = np.zeros((len(counts), int(width.max())), dtype=np.int32)
        table[np.arange(table.shape[1]) < width[:, None]] = np.frombuffer(blocks, dtype=np.int32)
        query_start = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(count, out=query_start[1:])
        owner = np.repeat(np.arange(len(counts)), count)
        positions = np.arange(len(tokens)) - query_start[owner] + start[owner]
        slots = table[owner, positions // size].astype(np.int64) * size + positions % size
        kv_lens = start + count

        def tensor(values: Any, dtype: type = np.int64) -> Tensor:
            return torch.from_numpy(np.asarray(values, dtype=dtype)).to(self._device)

        return Batch(
            tokens=tensor(np.frombuffer(tokens, dtype=np.int64)),
            positions=tensor(positions),
            slots=tensor(slots),
            block_table=tensor(table, np.int32),
            query_start=tensor(query_start, np.int32),
            kv_lens=tensor(kv_lens, np.int32),
            logit_rows=tensor(rows),
            query_lens_host=tuple(counts),
            kv_lens_host=tuple(kv_lens.tolist()),
        )

    def _move(self, out: Sequence[Move], copies: Sequence[Move], back: Sequence[Move]) -> None:
        """Copy blocks to host memory, then within the cache, then others from host memory. Bit for bit.

        On a GPU the transfers run on a stream of their own, from and to pinned memory; the forward waits for them.
        """
        if out:
            self._transfer(self._tensors(), self._host, out)
        if copies:
            source, target = torch.tensor(copies, dtype=torch.int64, device=self._device).unbind(1)
            for cache in self._tensors():
                cache[target] = cache[source]
        if back:
            self._transfer(self._host, self._tensors(), back)

    def _transfer(self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Sequence[Move]) -> None:
        if self._side is None:
            source, target = torch.tensor(moves, dtype=torch.int64).unbind(1)
            for from_, to in zip(sources, targets, strict=True):
                to[target] = from_[source]
            return
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for from_, to in zip(sources, targets, strict=True):
                for move in moves:
                    to[move.target].copy_(from_[move.source], non_blocking=True)
        current.wait_stream(self._side)

    def _tensors(self) -> list[Tensor]:
        """Every tensor of every cache; the first dimension of each is the block."""
        return [t for cache in self._caches for t in (cache if isinstance(cache, tuple) else (cache,))]


def _like_on_host(tensor: Tensor, num_blocks: int) -> Tensor:
    pinned = tensor.device.type == "cuda"
    return torch.empty((num_blocks, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned)


def _scores(logits: Tensor, first: int, scored: list[tuple[Chunk, int, int]]) -> dict[str, list[Logprobs]]:
    found = {}
    for chunk, start, end in scored:
        rows, first = logits[first : first + end - start], first + end - start
        request = chunk.request
        found[request.id] = score(rows, request.tokens[start + 1 : end + 1], request.sampling.prompt_logprobs or 0)
    return found
