"""What a step has to do, as the few numbers a latency model needs. It knows no seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from turnout.core.types import Chunk


class Work(NamedTuple):
    """The work of one step. A chunk of one token counts as a decode, as the core's own estimate has it."""

    prefill_tokens: int = 0  # of chunks with more than one token
    prefill_pairs: int = 0  # (token, key it attends to), summed over those chunks
    prefill_keys: int = 0  # keys those chunks read: the end of each, summed
    decodes: int = 0  # chunks of one token
    decode_keys: int = 0  # keys they read
    samples: int = 0  # rows that yield a token
    moved_blocks: int = 0  # between cache and host memory
    copied_blocks: int = 0  # within the cache

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decodes


def work_of(chunks: Iterable[Chunk], moved_blocks: int = 0, copied_blocks: int = 0) -> Work:
    """The work of these chunks, added up. One pass: it is called for every step of a simulation."""
    prefill_tokens = prefill_pairs = prefill_keys = decodes = decode_keys = samples = 0
    for _, start, count, sampled in chunks:
        if count == 1:
            decodes += 1
            decode_keys += start
        else:
            prefill_tokens += count
            prefill_pairs += count * start + count * (count + 1) // 2
            prefill_keys += start + count
        if sampled:
            samples += 1
    return Work(
        prefill_tokens,
        prefill_pairs,
        prefill_keys,
        decodes,
        decode_keys + decodes,
        samples,
        moved_blocks,
        copied_blocks,
    )
