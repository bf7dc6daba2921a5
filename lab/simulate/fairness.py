"""How evenly tenants are served while they wait for each other. It sees steps and queues, no policy.

Service is counted as in "Fairness in Serving Large Language Models" (OSDI 2024): 1 for a prompt token computed, 2 for a
token said; what a preemption makes an engine compute again counts for nobody. Only tenants that wait both when a window
begins and when it ends are compared: who asks for little gets little, and nobody is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnout.core.types import Request, Step
from turnout.lab.simulate.measure import Spread

LABEL = "tenant"
SAID = 2  # service of a token said


def jain(shares: Sequence[float]) -> float:
    """1: all equal; 1/n: one has it all (Jain, Chiu, Hawe 1984)."""
    total, squares = sum(shares), sum(share * share for share in shares)
    return total * total / (len(shares) * squares) if squares else 1.0


class Fairness:
    """Follows the service of each tenant, window by window."""

    def __init__(self, window: float) -> None:
        self._window = window
        self.ends = 0.0  # when the window does
        self._service: dict[str, int] = {}  # in all
        self._before: dict[str, int] = {}  # when the window began
        self._backlogged: set[str] = set()
        self._sum, self._count, self._worst, self._difference = 0.0, 0, 1.0, 0
        self._ttft: dict[str, Spread] = {}

    def served(self, step: Step) -> None:
        """A step is about to be computed."""
        service = self._service
        for request, start, count, samples in step.chunks:
            tenant = request.labels.get(LABEL, "")
            first, end = max(start, request.peak_computed), min(start + count, request.num_prompt)
            gained = (end - first if end > first else 0) + (SAID if samples else 0)
            service[tenant] = service.get(tenant, 0) + gained

    def finished(self, tenant: str, ttft: float) -> None:
        self._ttft.setdefault(tenant, Spread()).add(ttft)

    def look(self, now: float, waiting: Sequence[Request]) -> None:
        """Close a window that is over and begin the next."""
        backlogged = {request.labels.get(LABEL, "") for request in waiting}
        both = backlogged & self._backlogged
        if len(both) > 1:
            gained = [self._service.get(tenant, 0) - self._before.get(tenant, 0) for tenant in sorted(both)]
            index = jain(gained)
            self._sum, self._count, self._worst = self._sum + index, self._count + 1, min(self._worst, index)
            self._difference = max(self._difference, max(gained) - min(gained))
        self._before, self._backlogged, self.ends = dict(self._service), backlogged, now + self._window

    def summary(self) -> dict[str, Any] | None:
        """None where there is one tenant."""
        if len(self._service) < 2:
            return None
        compared = None
        if self._count:
            mean = round(self._sum / self._count, 6)
            compared = {"jain": mean, "jain_worst": round(self._worst, 6), "largest_difference": self._difference}
        tenants = {
            tenant: {"service": self._service.get(tenant, 0), "requests": spread.count, "ttft": spread.summary()}
            for tenant, spread in sorted(self._ttft.items())
        }
        return {"window": self._window, "windows": self._count, "compared": compared, "tenants": tenants}
