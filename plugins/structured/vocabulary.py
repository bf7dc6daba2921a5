"""What a tokenizer's folder says of its tokens. It knows no grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnout.core import ModelError


class Vocabulary:
    """A tokenizer's tokens. Raises ModelError for a folder without one that can be used."""

    def __init__(self, path: str, size: int) -> None:
        """`size`: the model's number of token ids, which may be more than the tokenizer knows."""
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # what transformers raises depends on what the files lack
            raise ModelError(
                f"the tokenizer in {path} can't be read, and a form of answers needs it; choose structured=none: {error}"
            ) from error
        if not self.tokenizer.is_fast:
            raise ModelError(
                f"the tokenizer in {path} is no fast one, so no form can be enforced; choose structured=none"
            )
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        file = Path(path) / "generation_config.json"
        generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        ends = [self.tokenizer.eos_token_id, generation.get("eos_token_id")]
        flat = [end for ids in ends for end in (ids if isinstance(ids, list) else [ids])]
        self.size = size
        self.end_ids = frozenset(end for end in flat if isinstance(end, int) and 0 <= end < size)
        self.added = {token.content: id for id, token in backend.get_added_tokens_decoder().items() if id < size}
        self.keep = torch.full((-(-size // 32),), -1, dtype=torch.int32)  # every bit, but those of end tokens
        for end in self.end_ids:
            self.keep[end // 32] &= torch.tensor(~(1 << end % 32) & 0xFFFFFFFF).to(torch.int32)
        self.find_bytes: Callable[[int], bytes] = lambda token: b""  # set by the library that knows

    @cached_property
    def _added_bytes(self) -> dict[int, bytes]:
        return {id: content.encode() for content, id in self.added.items()}

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to the text; an added token is its own spelling."""
        found = self._added_bytes.get(token)
        return self.find_bytes(token) if found is None else found

    def row(self) -> Tensor:
        """Room for one row of bits."""
        return torch.empty_like(self.keep)
