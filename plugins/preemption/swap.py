"""Preemption by moving out."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.core import Draft, PreemptMode, RequestView
from turnout.plugins.preemption.victims import ByRule


@dataclass
class Swap(ByRule):
    """Copies the victim's blocks to host memory and back, bit for bit (vLLM, SOSP 2023). When `host_blocks` are all
    taken, the victim is recomputed instead; that is counted as a swap fallback."""

    host_blocks: int = 256  # blocks of host memory set aside; 0: always recompute
    victim_rule: str = "newest"  # newest, least_lost, most_blocks, lowest_priority

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_blocks < 0:
            raise ValueError(f"preemption.host_blocks must not be negative, got {self.host_blocks}")

    @property
    def num_host_blocks(self) -> int:
        return self.host_blocks

    def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
        return PreemptMode.SWAP
