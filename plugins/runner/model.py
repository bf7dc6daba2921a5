"""Runs steps with a model in this process: moves blocks, computes, samples. It owns the caches and knows no queue.

With `async_scheduling` one worker thread computes, step after step, while the engine accounts for the step before and
schedules the next; the token a request does not know yet is filled in there from the step before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from turnout.core import AttentionBackend, Chunk, KVSpec, ModelError, ModelInfo, Sampling, Step
from turnout.core.model import Limits, Logprobs, Model, Move, Progress, Result
from turnout.core.structured import Constraint
from turnout.plugins.runner.allowance import processors
from turnout.plugins.runner.compiled import Compiled, missing_compiler
from turnout.plugins.runner.forward import Eager, Forward, Layers
from turnout.plugins.runner.graphs import CudaRecorder, Graphs, Recorder
from turnout.plugins.runner.layout import HostBatch, flatten
from turnout.plugins.runner.memory import fitting, room
from turnout.plugins.runner.sampler import sample, score

MODES = ("eager", "compile", "graphs")


@dataclass
class LocalRunner:
    """Runs steps in this process, on one device."""

    mode: str = "eager"  # eager, compile or graphs
    async_scheduling: bool = False  # the next step is scheduled while this one computes

    recorder: ClassVar[type[Recorder]] = CudaRecorder

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"runner.mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        self._limits: Limits | None = None
        self._progress: Progress = lambda stage, share: None

    @property
    def replays(self) -> bool:
        """Decode steps are recorded and replayed."""
        return self.mode == "graphs"

    def prepare(self, info: ModelInfo, limits: Limits, progress: Progress) -> ModelInfo:
        """Refuses a mode that this machine can't run."""
        if self.replays and info.device.type != self.recorder.device:
            raise ModelError(
                f"runner.mode=graphs replays CUDA graphs, and the model runs on {info.device}: "
                f"choose runner.mode=eager or compile, or a device that has them"
            )
        if self.mode == "compile" and (why := missing_compiler(info.device)):
            raise ModelError(f"runner.mode=compile can't be had here: {why}; choose runner.mode=eager")
        if info.device.type == "cpu":
            info = replace(info, notes=(*info.notes, _threads()))
        self._info, self._limits, self._progress = info, limits, progress
        return replace(info, traced=self.mode == "compile")

    def room(self, model: Model, attention: AttentionBackend[Any, Any], spec: KVSpec) -> tuple[int, str]:
        assert self._limits is not None
        free, rule = room(self._info, self._limits, model, self.replays)
        return fitting(self._info, self._limits, attention, spec, free, rule)

    def start(
        self,
        model: Model,
        attention: AttentionBackend[Any, Any],
        spec: KVSpec,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int,
    ) -> None:
        """Raises ModelError where the model can't be traced, or recorded, as the mode wants it."""
        self._spec, self._device = spec, device
        self._worker = ThreadPoolExecutor(1, "turnout-runner") if self.async_scheduling else None
        self._last: dict[str, int] = {}  # the tokens of the step submitted last
        if self.replays:
            spec = replace(spec, num_blocks=spec.num_blocks + 1)  # the last is nobody's: padding is written there
        self._layers = Layers(attention, spec, dtype, device)
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda" and num_host_blocks:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        caches = self._layers.tensors()
        self._host = [_like_on_host(t, num_host_blocks) for t in caches] if num_host_blocks else []
        self._forward = self._made(model)

    def _made(self, model: Model) -> Forward:
        eager = Eager(model, self._layers)
        if self.mode == "compile":
            return Compiled(model, self._layers, self._progress)
        if self.mode == "graphs":
            assert self._limits is not None and self._limits.max_model_len is not None
            most = min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
            recorder = self.recorder(self._device)
            return Graphs(model, self._layers, eager, most, self._limits.max_model_len, recorder, self._progress)
        return eager

    def run(self, step: Step) -> Result:
        """Moves first, then one forward pass over all chunks."""
        return self._run(step) if self._worker is None else self._worker.submit(self._run, step).result()

    @torch.inference_mode()
    def _run(self, step: Step) -> Result:
        self._move(step.swap_out, step.copies, step.swap_in)
        return (
            self._computed(flatten(step.chunks, self._spec.block_size), step.constraint) if step.chunks else Result([])
        )

    def submit(self, step: Step) -> Future[Result] | None:
        """Nothing to move, and nobody's sampling may look at tokens: they are written to meanwhile."""
        if self._worker is None or not step.chunks or step.swap_out or step.copies or step.swap_in:
            return None
        if any(_looks_back(chunk.request.sampling) for chunk in step.chunks):
            return None
        return self._worker.submit(self._run_behind, flatten(step.chunks, self._spec.block_size), step.constraint)

    @torch.inference_mode()
    def _run_behind(self, host_batch: HostBatch, constraint: Constraint | None) -> Result:
        for row, request_id in host_batch.unknown:
            host_batch.tokens[row] = self._last.get(
                request_id, 0
            )  # one without a token has failed: what it computes is lost
        self._last = {}
        result = self._computed(host_batch, constraint)
        self._last = dict(zip((chunk.request.id for chunk in host_batch.sampled), result.tokens, strict=True))
        return result

    def _computed(self, host_batch: HostBatch, constraint: Constraint | None) -> Result:
        logits, sampled = self._forward(host_batch), host_batch.sampled
        requests, num_done = [c.request for c in sampled], [c.end - c.request.num_prompt for c in sampled]
        tokens, logprobs, errors = sample(logits[: len(sampled)], requests, num_done, constraint)
        return Result(tokens, logprobs, errors, _scores(logits, len(sampled), host_batch.scored))

    def _move(self, out: Sequence[Move], copies: Sequence[Move], back: Sequence[Move]) -> None:
        """Copy blocks to host memory, then within the cache, then others from host memory. Bit for bit.

        On a GPU the transfers run on a stream of their own, from and to pinned memory; the forward waits for them.
        """
        if out:
            self._transfer(self._layers.tensors(), self._host, out)
        if copies:
            source, target = torch.tensor(copies, dtype=torch.int64, device=self._device).unbind(1)
            for cache in self._layers.tensors():
                cache[target] = cache[source]
        if back:
            self._transfer(self._host, self._layers.tensors(), back)

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


def _threads() -> str:
    """Compute on no more threads than this process may run at once, unless OMP_NUM_THREADS says how many; in words."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked:
        return f"computes on {torch.get_num_threads()} threads, by OMP_NUM_THREADS={asked}"
    allowed, why = processors()
    if allowed < torch.get_num_threads():
        torch.set_num_threads(allowed)
    num = torch.get_num_threads()
    spin = os.environ.get("GOMP_SPINCOUNT", "")
    return f"computes on {num} thread{'s' * (num > 1)}, by {why}" + (
        f"; they wait by GOMP_SPINCOUNT={spin}" if spin else ""
    )


def _looks_back(sampling: Sampling) -> bool:
    changed = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    return bool(changed) or sampling.prompt_logprobs is not None


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
