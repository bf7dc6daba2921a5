"""A workload's prompts as token ids a model knows. It knows no tokenizer: what is measured does not depend on the words.

The workloads of the simulator mark only where prompts are equal. Here each token becomes a number drawn from all that
stands before it back to the last mark, so that equal beginnings stay equal and everything else differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.lab.bench.load import PlannedRequest
from turnout.lab.workload.arrivals import FILLER

SPECIAL = 256  # first ids of most vocabularies: control tokens and single bytes; none of them is used where others are


@dataclass(frozen=True)
class PromptModel:
    """What must be known of a model to ask it something."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and answer


class Prompts:
    """Prompts for one run. Another `run` gives others of the same lengths: nothing is found in a cache that an earlier run
    filled."""

    def __init__(self, model: PromptModel, run: int) -> None:
        self._model, self._salt = model, _mixed(np.array([run], dtype=np.uint64))
        self._low = SPECIAL if model.vocab_size > 4 * SPECIAL else 3 if model.vocab_size > 8 else 0
        self._made: dict[str, list[int]] = {}
        self.num_cut = 0  # prompts that were longer than the context has room for

    def of(self, planned: PlannedRequest, said: Sequence[int] = ()) -> list[int]:
        """`said`: what the request before it answered, where that is known; it is part of this prompt then.

        The end of a prompt that is too long is cut off. Raises ValueError for recorded tokens the model does not have.
        """
        request = planned.request
        room = self._model.max_model_len - request.sampling.max_tokens
        if room < 1:
            raise ValueError(
                f"{request.id} is to say {request.sampling.max_tokens} tokens, which leaves no room for a prompt in a context "
                f"of {self._model.max_model_len}: lower workload.output"
            )
        if len(request.tokens) > room:
            self.num_cut += 1
        tokens = self._recorded(planned) if planned.recorded is not None else self._drawn(request.tokens[:room])
        if planned.before is not None:
            tokens = self._continued(planned.before.id, len(planned.before.tokens), tokens, said)
        tokens = tokens[:room]
        self._made[request.id] = tokens
        return tokens

    def forget(self, request_id: str) -> None:
        """Nothing will go on from it."""
        self._made.pop(request_id, None)

    def _recorded(self, planned: PlannedRequest) -> list[int]:
        tokens = planned.request.tokens
        if max(tokens) >= self._model.vocab_size:
            raise ValueError(
                f"{planned.request.id} was recorded with token id {max(tokens)}; this model's ids end at "
                f"{self._model.vocab_size - 1}"
            )
        return list(tokens)

    def _drawn(self, tokens: list[int]) -> list[int]:
        marks = np.array(tokens, dtype=np.uint64)
        before = np.concatenate(([np.uint64(2**63)], marks[:-1]))
        starts = (marks != FILLER) & (marks != before)
        starts[0] = True
        place = np.arange(len(tokens))
        origin = np.maximum.accumulate(np.where(starts, place, 0))
        number = (marks[origin] << np.uint64(32)) + (place - origin).astype(np.uint64)
        span = np.uint64(self._model.vocab_size - self._low)
        found: list[int] = (self._low + (_mixed(number ^ self._salt) % span).astype(np.int64)).tolist()
        return found

    def _continued(self, before: str, num_before: int, tokens: list[int], said: Sequence[int]) -> list[int]:
        made = self._made.pop(before, tokens[:num_before])
        rest = tokens[num_before:]
        return made + list(said) + rest[len(said) :]


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Well mixed bits of each (splitmix64, Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
