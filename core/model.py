"""The contracts of loaders, runners and formats, and what is known of a model: for authors of those three slots.

Apart from `turnout.core`, since whoever writes a policy, a backend or a quantizer needs none of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from turnout.core.interfaces import AttentionBackend, Quantizer
from turnout.core.types import KVSpec, LayerSpec, Limits, Logprobs, Move, Result, Step

__all__ = [
    "Attend", "Format", "Limits", "Logprobs", "Model", "ModelInfo", "ModelLoader", "ModelRunner", "Move", "Progress",
    "Report", "Result", "Runner", "StoredTensor", "TensorSource",
]  # fmt: skip

Progress = Callable[[str, float], None]  # (what is being done, share done)
Report = Callable[[str], None]  # what is being done


class Attend(Protocol):
    """Attention as a model sees it: an argument."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim]; returns [T, heads, v_head_dim]."""


class Model(Protocol):
    """A model with its weights."""

    def __call__(self, tokens: Tensor, positions: Tensor, logit_rows: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: int64 [T]; logit_rows: int64 [S]; returns logits [S, vocab]."""


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model before its weights load."""

    path: str  # the folder with config and tokenizer
    architecture: str
    layers: tuple[LayerSpec, ...]
    max_len: int  # tokens of prompt and output together
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    quantization: Mapping[str, Any] | None = None  # the checkpoint's quantization_config; None: it holds floats
    notes: tuple[str, ...] = ()  # what was chosen for the user, and why
    traced: bool = False  # torch.compile will trace it: no kernel may be called behind torch's back


class StoredTensor(NamedTuple):
    """What is known of a checkpoint's tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSource(Protocol):
    """Where tensors of a checkpoint come from."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, name: str) -> Tensor:
        """A copy on the CPU. Raises ModelError when the file has changed meanwhile."""


class Format(Protocol):
    """Model files of another kind, written as Hugging Face folders. Its name is the suffix of such files: `gguf`."""

    version: ClassVar[int]  # raise it when a conversion would come out otherwise: what is kept is then made anew

    def convert(self, file: Path, folder: Path, report: Report) -> None:
        """Fill the existing, empty `folder`. Raises ValueError with the reason when it can't be done faithfully."""


class ModelLoader(Protocol):
    """Makes a model of what the user named. Each method raises ModelError with the reason and the remedy."""

    def find(self, model: str, formats: Mapping[str, Format], report: Report) -> str:
        """The local folder of `model`, downloaded or converted if need be. `formats`: by suffix, those installed."""

    def inspect(self, path: str, dtype: str, device: str) -> ModelInfo:
        """Everything a composition can be checked against, without reading a weight. "auto" picks by stated rules."""

    def load(
        self, info: ModelInfo, quantizer: Quantizer, formats: Mapping[str, Format], progress: Callable[[int, int], None]
    ) -> Model:
        """The model, each linear layer made by `quantizer`; `progress`: (bytes read, bytes in all). What a quantizer and
        its layers may offer besides their contract is in `turnout.core.optional`."""


class Runner(Protocol):
    """Computes steps. A simulated one only advances a clock."""

    def run(self, step: Step) -> Result:
        """Do the step's moves, then compute its chunks."""


class ModelRunner(Runner, Protocol):
    """Computes them with a model, over caches it keeps."""

    @property
    def replays(self) -> bool:
        """Decode steps are recorded and replayed: attention must be able to (`Capabilities.graphs`)."""

    def prepare(self, info: ModelInfo, limits: Limits, progress: Progress) -> ModelInfo:
        """Called once, first, before weights load. Raises ModelError for what can't be done with this model or on this
        machine; returns `info` as the model must be loaded. `limits.max_model_len` is set."""

    def room(self, model: Model, attention: AttentionBackend[Any, Any], spec: KVSpec) -> tuple[int, str]:
        """Blocks of a cache as `spec`, which has one, that fit beside the model and the largest step, but no more than
        `limits` can fill; and the note that says by which rule. Raises ModelError when there is no room."""

    def start(
        self,
        model: Model,
        attention: AttentionBackend[Any, Any],
        spec: KVSpec,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int,
    ) -> None:
        """Reserve the caches, `num_host_blocks` blocks in host memory too. Called once, before `run`."""
