"""transformers' own model as a side: the outside truth. It shares no line of the engine: no cache of ours, no kernel, no batch.

Forced tokens are scored by one full forward pass over prompt and continuation, with the plainest attention transformers
has, one prompt at a time. Log-probabilities are computed in float32, or in float64 where the model
is (`[transformers, dtype=float64]`).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from turnout.compose import plugins
from turnout.compose.config import Config
from turnout.compose.plugins import versions
from turnout.core import ModelError
from turnout.core.model import ModelLoader
from turnout.core.types import Sampling
from turnout.lab.compare.measures import Mark
from turnout.lab.compare.sides import Item, Scored, SideError, Speed, Written

ROWS = 256  # positions whose log-probabilities are computed at once


class TransformersSide:
    """The model in the folder that a configuration names, in the dtype and on the device it asks for."""

    draws = ""  # its random numbers are its own

    def __init__(self, name: str, config: Config) -> None:
        """Raises ModelError when transformers can't load the folder by itself."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        loader: ModelLoader = config.loader
        path = loader.find(config.model, plugins.load().formats(), lambda stage: None)
        info = loader.inspect(path, config.dtype, config.device)
        logging.disable_progress_bar()
        try:
            net = AutoModelForCausalLM.from_pretrained(
                path, dtype=info.dtype, attn_implementation="eager", local_files_only=True
            )
        except Exception as error:  # what transformers raises depends on what it lacks
            raise ModelError(f"transformers can't load {path} by itself: {type(error).__name__}: {error}") from error
        self._net: Any = net.to(info.device).eval()
        self._device, self._wide = info.device, torch.promote_types(info.dtype, torch.float32)
        takes = inspect.signature(self._net.forward).parameters
        self._cache = "cache" if "cache" in takes else "past_key_values"  # its name until transformers 5.39
        self.name, self.dtype = name, str(info.dtype).removeprefix("torch.")
        self.origin: Mapping[str, object] = {
            "kind": "transformers",
            "model": config.model,
            "dtype": self.dtype,
            "device": str(info.device),
            "versions": versions(),
        }

    def score(self, items: Sequence[Item], num_top: int, *, prompts: bool) -> dict[str, Scored]:
        return {item.id: self._scored(item, num_top, prompts) for item in items}

    def write(self, items: Sequence[Item], samplings: Mapping[str, Sampling], num_top: int) -> dict[str, Written]:
        found = {}
        for item in items:
            sampling = samplings[item.id]
            if not sampling.greedy:
                raise SideError(f"{self.name} draws other random numbers, so only its greedy writing can be compared")
            marks = [_mark(row, int(row.argmax()), num_top) for row in self._writing(item, sampling.max_tokens)]
            found[item.id] = Written(tuple(int(mark.token) for mark in marks), marks)
        return found

    def race(self, items: Sequence[Item], max_tokens: int) -> Speed:
        """One prompt after another: it has no batching of its own to show."""
        speed = Speed()
        began = time.perf_counter()
        for item in items:
            last = began
            for number, row in enumerate(self._writing(item, max_tokens)):
                int(row.argmax())  # waits for the device
                now = time.perf_counter()
                (speed.itl if number else speed.ttft).append(now - last)
                last = now
                speed.num_tokens += 1
        speed.seconds = time.perf_counter() - began
        return speed

    @torch.inference_mode()
    def _scored(self, item: Item, num_top: int, prompts: bool) -> Scored:
        ids = [*item.prompt, *item.continuation]
        first = 1 if prompts else len(item.prompt)  # the first token that is scored
        logits = self._net(input_ids=self._row(ids[:-1]), use_cache=False).logits[0]
        marks: list[Mark] = []
        for start in range(first, len(ids), ROWS):
            rows = logits[start - 1 : start - 1 + ROWS].to(self._wide).log_softmax(-1)
            marks += _marks(rows, ids[start : start + ROWS], num_top)
        return Scored(marks[: len(item.prompt) - first], marks[len(item.prompt) - first :])

    @torch.inference_mode()
    def _writing(self, item: Item, max_tokens: int) -> Iterator[Tensor]:
        """The log-probabilities [vocab] of each greedy token."""
        from transformers import DynamicCache

        kept, ids = DynamicCache(config=self._net.config), list(item.prompt)
        for _ in range(max_tokens):
            out = self._net(input_ids=self._row(ids), use_cache=True, **{self._cache: kept})
            row = out.logits[0, -1].to(self._wide).log_softmax(-1)
            yield row
            ids = [int(row.argmax())]

    def _row(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self._device)


def _mark(row: Tensor, token: int, num_top: int) -> Mark:
    return _marks(row[None], [token], num_top)[0]


def _marks(rows: Tensor, tokens: Sequence[int], num_top: int) -> list[Mark]:
    """rows: [N, vocab]."""
    best = rows.topk(min(num_top, rows.shape[1]))
    chosen = rows.gather(1, torch.tensor(list(tokens), device=rows.device)[:, None])[:, 0].tolist()
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        Mark(token, logprob, tuple(zip(i, v, strict=True)))
        for token, logprob, i, v in zip(tokens, chosen, ids, values, strict=True)
    ]
