"""Decode steps recorded once and replayed: one launch for all kernels of a step, as CUDA graphs (CUDA 10).

A recording is tied to its shapes and addresses. So a step of B decodes is padded to the next size that was recorded,
and its tensors are copied into buffers that stay:

    tokens   b0 b1 b2  0        size 4, B = 3
    slots    .  .  .   S        S: in the spare block, which belongs to nobody
    kv_lens  9  3  70  1        the padded row sees one key, in the spare block

A step that is not all decodes, or larger than the largest size, runs as `eager` does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from turnout.core import Batch, ModelError
from turnout.core.model import Model, Progress
from turnout.core.optional import RefreshingPlans
from turnout.plugins.runner.forward import Forward, Layers
from turnout.plugins.runner.layout import HostBatch

WARM_UPS = 2  # libraries choose kernels and reserve workspaces in their first calls, which no recording may hold
FINE, COARSE, FINE_UP_TO = 8, 32, 256  # sizes are multiples of FINE up to FINE_UP_TO, then of COARSE


class Recorder(Protocol):
    """Records what a function launches."""

    device: ClassVar[str]  # torch's device type

    def __init__(self, device: torch.device) -> None: ...

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Call `compute`, a few times perhaps; the returned call launches the same again, with the same addresses."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory."""

    device: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            compute()
        replay: Callable[[], None] = graph.replay
        return replay


class Recorded(NamedTuple):
    """A decode step of one size: its buffers, its plans, its recording."""

    batch: Batch
    plans: list[object]
    replay: Callable[[], None]


def sizes(most: int) -> list[int]:
    """The sizes to record for steps of up to `most` decodes, ascending."""
    found = {1, 2, 4, *range(FINE, FINE_UP_TO + 1, FINE), *range(FINE_UP_TO, most, COARSE)}
    return sorted(size for size in found if size < most) + [most]


class Graphs:
    """Replays decode steps; computes every other one with `eager`. The last block of the caches is the spare one."""

    def __init__(
        self,
        model: Model,
        layers: Layers,
        eager: Forward,
        most: int,
        max_len: int,
        recorder: Recorder,
        progress: Progress,
    ) -> None:
        """`most`: requests in the largest decode step; `max_len`: tokens of the longest request. Raises ModelError when
        the model or the backend can't be recorded."""
        if not isinstance(layers.attention, RefreshingPlans):
            raise ModelError(
                f"runner.mode=graphs needs plans that can be refreshed, and {type(layers.attention).__name__} has no "
                f"`refresh`; choose another attention, or runner.mode=eager"
            )
        self._model, self._layers, self._eager, self._recorder = model, layers, eager, recorder
        size, num_blocks = layers.spec.block_size, layers.spec.num_blocks
        self._spare, self._longest = num_blocks - 1, min(max_len, (num_blocks - 1) * size)
        self._width = -(-self._longest // size)
        self._sizes = sizes(most)
        self._logits: Tensor | None = None
        self._recorded: dict[int, Recorded] = {}
        for done, each in enumerate(reversed(self._sizes)):  # smaller ones find their memory in the pool
            progress("recording decode steps", done / len(self._sizes))
            self._recorded[each] = self._record(each)

    @torch.inference_mode()
    def _record(self, size: int) -> Recorded:
        batch = self._buffers(size)
        plans = self._layers.plan(batch)
        self._layers.refresh(plans, batch)  # a backend may take buffers of its own for a plan that is replayed
        attend = self._layers.attend(plans)
        if self._logits is None:
            logits = self._model(batch.tokens, batch.positions, batch.logit_rows, attend)
            self._logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        out = self._logits[:size]

        def compute() -> None:
            out.copy_(self._model(batch.tokens, batch.positions, batch.logit_rows, attend))

        try:
            return Recorded(batch, plans, self._recorder.record(compute))
        except RuntimeError as error:
            raise ModelError(
                f"runner.mode=graphs can't record a decode step of {size} requests with "
                f"{type(self._layers.attention).__name__}: {error}; choose another attention, or runner.mode=eager"
            ) from error

    def _buffers(self, size: int) -> Batch:
        """A batch of padding, planned for the longest requests so that no later batch needs more."""
        device, slot = self._layers.device, self._spare * self._layers.spec.block_size

        def filled(value: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return Batch(
            tokens=filled(0, size),
            positions=filled(0, size),
            slots=filled(slot, size),
            block_table=filled(self._spare, size, self._width, dtype=torch.int32),
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
            kv_lens=filled(self._longest, size, dtype=torch.int32),
            logit_rows=torch.arange(size, device=device),
            query_lens_host=(1,) * size,
            kv_lens_host=(self._longest,) * size,
        )

    def __call__(self, host_batch: HostBatch) -> Tensor:
        num = len(host_batch.query_lens)
        if num != len(host_batch.tokens) or num > self._sizes[-1]:
            return self._eager(host_batch)
        recorded = self._recorded[self._sizes[bisect_left(self._sizes, num)]]
        self._layers.refresh(recorded.plans, self._filled(recorded.batch, host_batch))
        recorded.replay()
        assert self._logits is not None
        return self._logits[: len(host_batch.logit_rows)]

    def _filled(self, batch: Batch, host_batch: HostBatch) -> Batch:
        """The batch's tensors, now holding the step, with its lengths on the host."""
        size, (num, width) = len(batch.query_lens_host), host_batch.block_table.shape
        slot = self._spare * self._layers.spec.block_size
        for buffer, values, padding in (
            (batch.tokens, host_batch.tokens, 0),
            (batch.positions, host_batch.positions, 0),
            (batch.slots, host_batch.slots, slot),
            (batch.kv_lens, host_batch.kv_lens, 1),
            (batch.logit_rows, host_batch.logit_rows, 0),
        ):
            padded = np.full(size, padding, dtype=values.dtype)
            padded[: len(values)] = values
            buffer.copy_(torch.from_numpy(padded))
        table = np.full((size, width), self._spare, dtype=np.int32)
        table[:num] = host_batch.block_table
        batch.block_table[:, :width].copy_(torch.from_numpy(table))
        keys = (*host_batch.kv_lens.tolist(), *(1,) * (size - num))
        return replace(batch, kv_lens_host=keys)
