"""Runs steps with a model in this process: moves blocks, computes, samples. It owns the caches and knows no queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from turnout.core import (
    AttentionBackend,
    Chunk,
    KVSpec,
    Limits,
    Logprobs,
    Model,
    ModelError,
    ModelInfo,
    Move,
    Progress,
    Result,
    Step,
)
from turnout.plugins.runner.compiled import Compiled, missing_compiler
from turnout.plugins.runner.forward import Eager, Forward, Layers
from turnout.plugins.runner.graphs import CudaRecorder, Graphs, Recorder
from turnout.plugins.runner.layout import lay
from turnout.plugins.runner.memory import room
from turnout.plugins.runner.sampler import sample, score

MODES = ("eager", "compile", "graphs")


@dataclass
class LocalRunner:
    """Runs steps in this process, on one device."""

    mode: str = "eager"

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
        self._info, self._limits, self._progress = info, limits, progress
        return replace(info, traced=self.mode == "compile")

    def room(self, model: Model) -> tuple[int, str]:
        assert self._limits is not None
        return room(self._info, self._limits, model, self.replays)

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

    @torch.inference_mode()
    def run(self, step: Step) -> Result:
        """Moves first, then one forward pass over all chunks."""
        self._move(step.swap_out, step.copies, step.swap_in)
        if not step.chunks:
            return Result([])
        laid = lay(step.chunks, self._spec.block_size)
        logits = self._forward(laid)
        sampled = laid.sampled
        tokens, logprobs, errors = sample(logits[: len(sampled)], [c.request for c in sampled])
        return Result(tokens, logprobs, errors, _scores(logits, len(sampled), laid.scored))

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
