"""Model loaders: from what the user named to a model with its weights. Listing them imports no model library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from turnout.core import ModelInfo, Quantizer, Register, hookimpl
from turnout.core.model import Format, Model, ModelLoader, Report
from turnout.kernels import cpu as native
from turnout.plugins.loader import checkpoint, model


@dataclass
class Transformers:
    """Any causal language model that transformers' own code runs, from a Hugging Face folder, a file of a known
    format, or the hub."""

    def find(self, model: str, formats: Mapping[str, Format], report: Report) -> str:
        return checkpoint.resolve(model, formats, report)

    def inspect(self, path: str, dtype: str, device: str) -> ModelInfo:
        return model.inspect(path, dtype, device)

    def load(
        self,
        info: ModelInfo,
        quantizer: Quantizer,
        formats: Mapping[str, Format],
        progress: Callable[[int, int], None],
    ) -> Model:
        assert isinstance(info, model.Info), "the engine gives back what `inspect` returned"
        return model.load(info, quantizer, formats, progress)

    @staticmethod
    def kernels() -> str:
        return native.kernels()


@hookimpl
def register_loaders(register: Register[ModelLoader]) -> None:
    register("transformers", Transformers)
