"""Preemption by forgetting."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.core import Draft, PreemptMode, RequestView
from turnout.plugins.preemption.victims import ByRule


@dataclass
class Recompute(ByRule):
    """Throws the victim's keys and values away; its tokens are computed again when it is readmitted (vLLM, SOSP 2023).

    Needs no host memory, and what the prefix cache still holds is not computed again. In float32 the tokens stay the
    same; narrower types may round differently in a prompt than in single steps (docs/schedulers.md has the measure).
    """

    victim_rule: str = "newest"  # newest, least_lost, most_blocks, lowest_priority

    @property
    def num_host_blocks(self) -> int:
        return 0

    def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
        return PreemptMode.RECOMPUTE
