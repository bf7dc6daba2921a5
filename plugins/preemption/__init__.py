"""What happens to a preempted request's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, Preemption, PreemptMode, Register, Request, hookimpl


@dataclass
class Recompute:
    """Throws them away; the request's tokens are computed again when it is readmitted (vLLM, SOSP 2023)."""

    @property
    def num_host_blocks(self) -> int:
        return 0

    def victim(self, candidates: Sequence[Request], draft: Draft) -> Request:
        return candidates[-1]

    def mode(self, request: Request, draft: Draft) -> PreemptMode:
        return PreemptMode.RECOMPUTE


@dataclass
class Swap:
    """Copies them to host memory and back, bit for bit (vLLM, SOSP 2023). When `host_blocks` are all taken, the victim
    is recomputed instead; that is counted as a swap fallback."""

    host_blocks: int = 256  # blocks of host memory set aside; 0: always recompute

    def __post_init__(self) -> None:
        if self.host_blocks < 0:
            raise ValueError(f"preemption.host_blocks must not be negative, got {self.host_blocks}")

    @property
    def num_host_blocks(self) -> int:
        return self.host_blocks

    def victim(self, candidates: Sequence[Request], draft: Draft) -> Request:
        return candidates[-1]

    def mode(self, request: Request, draft: Draft) -> PreemptMode:
        return PreemptMode.SWAP


@hookimpl
def register_preemptions(register: Register[Preemption]) -> None:
    register("recompute", Recompute)
    register("swap", Swap)
