"""The model traced as one graph and compiled by torch.compile's Inductor. Attention stays a call it does not look into.

The number of tokens is left open, so that one compilation serves every step; a step of a single token is padded to
two, since a compiler takes a 1 for a constant.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import weakref

import torch
from torch import Tensor

from turnout.core import ModelError
from turnout.core.model import Model, Progress
from turnout.plugins.runner.forward import Layers
from turnout.plugins.runner.layout import HostBatch

LEAST = 2  # tokens, and rows of logits
TRIAL = (24, 5)  # tokens and rows it is traced with: two numbers, or it would take them for one

_compiled: weakref.WeakValueDictionary[int, Compiled] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def missing_compiler(device: torch.device) -> str | None:
    """Why torch.compile can't work on this machine; None: it can."""
    if device.type == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            return "torch.compile needs a C++ compiler on a CPU, and none was found (install g++, or set CXX)"
        return None
    from torch.utils import _triton

    if not _triton.has_triton():
        return f"torch.compile needs Triton for {device.type}, and it is not installed or does not support this device"
    if shutil.which("cc") is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "torch.compile's Triton needs a C compiler, and none was found (install gcc)"
    return None


@functools.cache
def _library() -> torch.library.Library:
    """Defines attention as an operator. An operator takes tensors and numbers only, so a number says whose it is."""
    library = torch.library.Library("turnout", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("attend(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer, int runner) -> Tensor")  # type: ignore[no-untyped-call]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: int, runner: int) -> Tensor:
        return _compiled[runner].attend(layer, q, k, v, sinks)

    def shape(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: int, runner: int) -> Tensor:
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2])

    library.impl("attend", attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("turnout::attend", shape, lib=library)
    return library


class Compiled:
    """Computes every step with the compiled model."""

    def __init__(self, model: Model, layers: Layers, progress: Progress) -> None:
        """Compiles. Raises ModelError for a model that can't be traced whole."""
        self._layers, self._num = layers, 0
        number = next(_numbers)
        _compiled[number] = self
        _library()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            found: Tensor = torch.ops.turnout.attend(q, k, v, sinks, layer, number)
            return found

        def forward(tokens: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
            return model(tokens, positions, logit_rows, attend)

        progress("compiling the model", 0.0)
        self._run = torch.compile(forward, fullgraph=True)
        try:
            self._try_out()
        except Exception as error:
            reason = " ".join(str(error).split("\n")[:2]).strip()
            raise ModelError(
                f"runner.mode=compile can't compile this model, choose runner.mode=eager: {type(error).__name__}: {reason}"
            ) from error

    @torch.inference_mode()
    def _try_out(self) -> None:
        tokens, rows = (torch.zeros(num, dtype=torch.int64, device=self._layers.device) for num in TRIAL)
        asked = tokens, tokens.clone(), rows
        for tensor in asked:
            torch._dynamo.mark_dynamic(tensor, 0)
        self._run(*asked)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """What the operator does: attention over the rows that are no padding; without plans, on trial, nothing."""
        num = self._num
        if num == len(q):
            return self._attend(layer, q, k, v, sinks).contiguous()
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        if num:
            out[:num] = self._attend(layer, q[:num], k[:num], v[:num], sinks)
        return out

    def __call__(self, host_batch: HostBatch) -> Tensor:
        batch = host_batch.batch(self._layers.device)
        self._attend, self._num = self._layers.attend(self._layers.plan(batch)), len(host_batch.tokens)
        logits: Tensor = self._run(*(_padded(t) for t in (batch.tokens, batch.positions, batch.logit_rows)))
        return logits[: len(host_batch.logit_rows)]


def _padded(tensor: Tensor) -> Tensor:
    missing = LEAST - len(tensor)
    return torch.nn.functional.pad(tensor, (0, missing)) if missing > 0 else tensor
