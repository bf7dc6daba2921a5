"""llama.cpp's .gguf files. Heavy libraries are imported only when a file is converted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from turnout.core.model import Report, TensorSource


@dataclass
class GGUF:
    """Writes a .gguf file as a Hugging Face folder that computes the same, and refuses one where it can't.

    Every tensor of the file is used or skipped by name, every parameter of the model is filled, and metadata that
    would change the computation is carried over or refused. Half-precision tensors keep their type, quantized ones
    become float32.
    """

    version: ClassVar[int] = 2

    def convert(self, file: Path, folder: Path, report: Report) -> None:
        """Raises ValueError with the reason when the file can't be written faithfully."""
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        from turnout.plugins.formats.gguf.config import configuration
        from turnout.plugins.formats.gguf.reader import Reader
        from turnout.plugins.formats.gguf.tokenizer import write_tokenizer
        from turnout.plugins.formats.gguf.weights import write_weights

        report(f"reading {file.name}")
        reader = Reader(file)
        config = configuration(reader, report)
        stops = write_tokenizer(reader, folder, report)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        config.architectures = [type(model).__name__]
        config.dtype = write_weights(reader, model, folder, report)
        config.save_pretrained(folder)
        GenerationConfig(
            bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id, eos_token_id=stops or None
        ).save_pretrained(folder)

    def packed(self, file: Path, num_layers: int, modules: Collection[str]) -> TensorSource:
        from turnout.plugins.formats.gguf.packed import Packed

        return Packed(file, num_layers, sorted(modules))
