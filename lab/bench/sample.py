"""What happened to one request, as times. It knows no engine and no HTTP; percentiles are made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Sample:
    """Times are seconds after the load began, on the clock of whoever sent it."""

    id: str
    planned: float  # when it was to be sent
    sent: float  # when it was
    num_prompt: int  # tokens
    num_wanted: int  # tokens of the answer that were asked for
    tenant: str = ""  # latencies are told apart by it
    deliveries: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens that came together)
    ended: float | None = None
    error: str | None = None  # why it failed: then it is in no latency and no throughput
    num_cached: int = 0  # prompt tokens that were found in a cache, where the server says so

    @property
    def num_said(self) -> int:
        return sum(count for _, count in self.deliveries)

    @property
    def ttft(self) -> float:
        """From the planned time to the first token."""
        return self.deliveries[0][0] - self.planned

    @property
    def e2e(self) -> float:
        """From the planned time to the last token."""
        return self.deliveries[-1][0] - self.planned

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first delivery; None: everything came at once."""
        (first, count), (last, _) = self.deliveries[0], self.deliveries[-1]
        more = self.num_said - count
        return (last - first) / more if more else None

    @property
    def itl(self) -> list[float]:
        """Every gap between two deliveries. Tokens that came together have one gap: none is counted as free."""
        times = [time for time, _ in self.deliveries]
        return [after - before for before, after in pairwise(times)]
