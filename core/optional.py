"""What a component may offer besides its contract. The engine finds each of these by its members; nothing is inherited.

Apart from `turnout.core`, since a plugin works without any of it. Whoever offers one writes all of its members.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from turnout.core.model import ModelInfo, TensorSource
from turnout.core.types import Batch, BlockMoves, BlockStats, LayerSpec, Request, Result, Step

__all__ = [
    "AsyncRunner", "BlockMoves", "BlockStats", "DequantizingLinear", "JoiningLinear", "MachineCheck", "NamedKernels",
    "NativeProduct", "NotedModel", "PackedFormat", "PackedQuantizer", "PreparedQuantizer", "Ranked", "RefreshingPlans",
    "RefusingBackend", "SharingBlocks", "StackCheck", "Versioned",
]  # fmt: skip

PlanT_contra = TypeVar("PlanT_contra", contravariant=True)


@runtime_checkable
class Versioned(Protocol):
    """Any slot."""

    contract: ClassVar[int]  # the version of the slot's contract it was written for; without: the current one


@runtime_checkable
class MachineCheck(Protocol):
    """Any slot, for a component that can't be had everywhere."""

    @staticmethod
    def obstacle() -> str | None:
        """Why it can't be had on this machine, and what to do; None: it can. Called on the class; imports nothing heavy."""


@runtime_checkable
class NamedKernels(Protocol):
    """Any slot, for a component that computes with native code of its own."""

    def kernels(self) -> str:
        """A hash of the code and of what it was compiled with: a part of the fingerprint. Empty: none is used."""


@runtime_checkable
class SharingBlocks(Protocol):
    """blocks: for a block manager that copies: forks with copy-on-write, a host tier for what is evicted.

    The engine calls `begin` before a step is scheduled, `moves` when it is, `settle` when it was computed or failed.
    """

    stats: BlockStats

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory to set aside for evicted prefixes; 0: none."""

    def begin(self, now: float) -> None:
        """A step begins; seconds on the engine's clock."""

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Give a request without blocks those of `parent` that hold its first `num_tokens` tokens, a part-full last one
        included, and set `num_computed`. From then on `grow` gives whoever comes to write into a block that others
        hold, or may find, a copy of its own."""

    def moves(self) -> BlockMoves:
        """What must be copied for all that was handed out since the last call."""

    def settle(self, happened: bool) -> None:
        """The moves handed out last have happened. Or they never will: nothing that depended on them may be found."""


@runtime_checkable
class RefusingBackend(Protocol):
    """attention: for one whose abilities hang on an installed version or on the card."""

    @staticmethod
    def refusals(
        layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device, cache_dtype: str
    ) -> list[str]:
        """Reasons, beside those of `capabilities`, why it can't serve such a model here. Called on the class."""


@runtime_checkable
class RefreshingPlans(Protocol[PlanT_contra]):
    """attention: for a backend with `capabilities.graphs`: its decode steps can be replayed as CUDA graphs."""

    def refresh(self, plan: PlanT_contra, batch: Batch, layer: LayerSpec, block_size: int) -> None:
        """Bring a plan up to date in place: its tensors now hold another batch of as many requests and tokens. Called
        before `run` is recorded, too: from then on `run` launches the same kernels, with the same addresses."""


@runtime_checkable
class PreparedQuantizer(Protocol):
    """quant: for a quantizer that must know more than single layers."""

    def prepare(self, settings: Mapping[str, Any] | None, info: ModelInfo) -> None:
        """Called once, before weights load. `settings`: the checkpoint's quantization_config; None: it holds floats.
        Raises ModelError for what it can't do."""


@runtime_checkable
class Ranked(Protocol):
    """quant: which of those that read a checkpoint quant=auto takes; without a rank it is 0. structured: for one that takes
    part in structured=auto."""

    auto_rank: ClassVar[float]  # highest first; equal ones: Turnout's own, then by name


@runtime_checkable
class StackCheck(Protocol):
    """quant: for one that must not leave a weight as it is unasked."""

    def check_stacked(self, name: str, shape: tuple[int, ...]) -> None:
        """Called, before weights load, for each tensor of several matrices (experts), which no linear layer holds and which
        stays as it is stored. Raises ModelError to refuse."""


@runtime_checkable
class PackedQuantizer(Protocol):
    """quant: for one whose `linear` reads a model file's own packed matrices (`PackedFormat`), not the folder's floats."""

    packed_format: ClassVar[str]  # the format's name

    def embedding(self, name: str, linear: nn.Module) -> nn.Module:
        """int64 [...] -> [..., in_features]: the rows of a layer that `linear` made; a head tied to it is that layer."""


@runtime_checkable
class PackedFormat(Protocol):
    """format: for files whose quantized matrices may stay in memory as they are."""

    def packed(self, file: Path, num_layers: int, modules: Collection[str]) -> TensorSource:
        """The quantized matrices among those of `modules`, paths in transformers' model, named MODULE.KIND, any KIND but
        "weight"; a module stored in floats is left out. Raises ValueError for what is not kept packed."""


@runtime_checkable
class JoiningLinear(Protocol):
    """A layer of a quantizer: siblings that read one input (q, k, v; gate, up) are computed in one product."""

    in_features: int
    out_features: int

    @classmethod
    def joined(cls, layers: Sequence[Self]) -> nn.Module | None:
        """One layer whose outputs are those of `layers`, all of this class, end to end; None: these can't be joined."""


@runtime_checkable
class DequantizingLinear(Protocol):
    """A layer of a quantizer: what it computes can be compared in floats."""

    def dequantize(self) -> Tensor:
        """float32 [out, in], the weights it multiplies by."""


@runtime_checkable
class NotedModel(Protocol):
    """A loader's model that has something to say of how it was loaded, for the start and `/server_info`."""

    notes: tuple[str, ...]


@runtime_checkable
class NativeProduct(Protocol):
    """A layer of a quantizer: kernels of a whole decoder layer call its product without coming back to Python."""

    in_features: int
    out_features: int
    bias: Tensor | None  # for who looks at the model: the product adds it

    def native_product(self) -> tuple[int, int] | None:
        """(run, data), the address of
        `int run(const void *data, const float *x, float *out, int64_t rows, int64_t threads)` and its first argument:
        x [rows, in_features] to out [rows, out_features], contiguous float32 on the CPU, the bias added; it returns 0, or 2
        where memory is short, and throws nothing. None: there is no native kernel for it here. Lays the weights out for the
        kernel if they are not; the layer keeps `data`, and all it points to, alive and in place."""


@runtime_checkable
class AsyncRunner(Protocol):
    """runner: for a runner that computes one step while the engine schedules the next."""

    def submit(self, step: Step) -> Future[Result] | None:
        """Compute a step behind all those before it. Its requests are read now: they change afterwards. A token that is
        PENDING is what the step submitted last samples for its request. None: the engine must wait for that token, then
        `run` the step; always so for a step that moves blocks, or has no chunks."""
