"""Equal service for every tenant that has work waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core import Draft, Policy, RequestView


@dataclass
class Fair(Policy):
    """Admits for the tenant that was served least: a virtual token counter each (Sheng et al., "Fairness in Serving Large
    Language Models", OSDI 2024).

    A counter grows by `input_weight` for each prompt token, at admission, and by `output_weight` for each token generated;
    further answers to a prompt, and beams, share what the first has paid for.
    A tenant that comes back is lifted to the lowest counter among those that wait: being away saves up nothing. Requests
    without the label are one tenant together. Out of blocks, the tenant served most gives way. Use it where one client's
    burst must not delay the others.

    Bound: while two tenants both have requests waiting, their service differs by at most twice the larger of
    input_weight * longest prompt and output_weight * tokens the cache holds (theorem 4.4 of the paper). Within a tenant
    it is first come, first served.
    """

    tenant_label: str = "tenant"  # the request label that names the tenant
    input_weight: float = 1.0  # service of a prompt token
    output_weight: float = 2.0  # service of a generated one
    chunk: int = 256  # tokens of one prompt in a step, at most

    def __post_init__(self) -> None:
        for name in ("input_weight", "output_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"scheduler.{name} must not be negative, got {getattr(self, name)}")
        if self.chunk < 1:
            raise ValueError(f"scheduler.chunk must be at least 1, got {self.chunk}")
        self._served: dict[str, float] = {}
        self._queued: set[str] = set()  # tenants that had requests waiting after the last step
        self._last: str | None = None  # the tenant whose last waiting request was admitted last
        self._floor = 0.0  # nobody that waits was served less

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        tenants = dict.fromkeys(map(self._tenant, waiting))
        self._lift(tenants, running)
        self._queued = set(tenants)
        super().schedule(waiting, running, draft)
        for taken in draft.taken:
            if taken.samples:
                self._served[self._tenant(taken.request)] += self.output_weight

    def admit(self, waiting: Sequence[RequestView], draft: Draft) -> None:
        queues: dict[str, deque[RequestView]] = {}
        for request in waiting:
            queues.setdefault(self._tenant(request), deque()).append(request)
        while queues:
            tenant = min(queues, key=self._served.__getitem__)
            request = queues[tenant].popleft()
            if not draft.admit(request, self.chunk):
                return
            if request.scheduled_at is None and request.parent is None:  # else its parent's prompt is its own
                self._served[tenant] += self.input_weight * request.num_prompt
            if not queues[tenant]:
                del queues[tenant]
                self._queued.discard(tenant)
                self._last = tenant

    def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        most = max(self._served[self._tenant(request)] for request in candidates)
        return draft.victim([r for r in candidates if self._served[self._tenant(r)] == most])

    def _tenant(self, request: RequestView) -> str:
        return request.labels.get(self.tenant_label, "")

    def _lift(self, tenants: dict[str, None], running: Sequence[RequestView]) -> None:
        """Raise the counters of tenants that begin to wait; forget those that are away and would be raised anyway."""
        served = self._served
        still = [served[tenant] for tenant in tenants if tenant in self._queued]
        self._floor = max(self._floor, min(still) if still else served.get(self._last or "", 0.0))
        for tenant in tenants:
            if tenant not in self._queued:
                served[tenant] = max(served.get(tenant, 0.0), self._floor)
        present = tenants.keys() | set(map(self._tenant, running))
        for tenant in present - served.keys():
            served[tenant] = self._floor
        if len(served) > 2 * len(present):
            self._served = {t: n for t, n in served.items() if t in present or n > self._floor}
