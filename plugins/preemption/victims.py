"""Which of several running requests makes room. It knows requests, and nothing of what happens to them then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from turnout.core import Draft, RequestView

RULES: Mapping[str, Callable[[RequestView], float]] = {  # the highest gives way; of equals the newest
    "newest": lambda request: request.arrived,
    "least_lost": lambda request: -request.num_computed,  # the least work thrown away or moved
    "most_blocks": lambda request: request.num_blocks,  # the fewest victims
    "lowest_priority": lambda request: request.priority,  # a higher number is less urgent
}


class ByRule:
    """The victim by the option `victim_rule`."""

    victim_rule: str

    def __post_init__(self) -> None:
        if self.victim_rule not in RULES:
            raise ValueError(f"preemption.victim_rule must be one of {', '.join(RULES)}, got {self.victim_rule!r}")

    def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        return max(reversed(candidates), key=RULES[self.victim_rule])
