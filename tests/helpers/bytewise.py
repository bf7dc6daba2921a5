"""A tiny model in a folder of its own, with a tokenizer whose tokens are bytes: for commands that need both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models import save

VOCAB = 260  # 256 bytes and the special tokens


def save_model(folder: Path, architecture: str = "llama", **options: Any) -> Path:
    """Random weights, float32. `options` go into the model's configuration."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save(architecture, folder, **{"vocab_size": VOCAB, "max_position_embeddings": 2048} | options)
    special = ["<pad>", "<s>", "</s>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    ).save_pretrained(folder)
    return folder
