"""What came of a simulation: counters and distributions, whose size does not grow with the trace."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from turnout.core.engine import Engine
from turnout.core.types import Output, Request, Stats
from turnout.lab.simulate.config import SimulateConfig
from turnout.lab.simulate.fairness import LABEL, Fairness
from turnout.lab.simulate.measure import Spread, Timeline

ID, FINISH = itemgetter(0), itemgetter(2)  # of an Output
MEASURES = ("ttft", "itl", "tpot", "e2e", "queue")


class SimulationRecord:
    """Follows one engine. `ttft`: arrival to first token; `itl`: every gap between two tokens of a request; `tpot`: the
    mean gap of a request; `e2e`: arrival to last token; `queue`: arrival to the first step it is in."""

    def __init__(self, config: SimulateConfig, allowed: Mapping[str, int] | None = None) -> None:
        """`allowed`: how many values may be above each bound of `capacity`; more make the run hopeless."""
        self._target, self.bounds, self._allowed = config.target, config.capacity.bounds, allowed or {}
        spreads = (Spread(self.bounds.get(name, math.inf)) for name in MEASURES)
        self.ttft, self.itl, self.tpot, self.e2e, self.queue = spreads
        self.fairness = Fairness(config.window)
        self.timeline = Timeline("waiting", "running", "blocks_used")
        self.num_added = self.num_refused = self.num_finished = self.num_good = 0
        self.num_behind = 0  # requests passed over by the last step before the last one arrived
        self.first_refusal = ""
        self.offered: float | None = None  # requests a second; None: clients ask when they are answered
        self.seconds = self.last_arrival = self.wall_seconds = 0.0
        self.stats = Stats()
        self._said: dict[str, float] = {}  # when each open request said its last token
        self._scheduling = self._accounting = 0.0  # wall seconds
        self._running = self._most_running = self._most_waiting = 0

    @property
    def hopeless(self) -> bool:
        """Some bound can't be kept any more."""
        return any(getattr(self, name).over > most for name, most in self._allowed.items())

    def added(self, request: Request) -> bool:
        """Whether it belongs to a tenant: then service is followed."""
        self.num_added += 1
        self.last_arrival = max(self.last_arrival, request.arrived)
        return LABEL in request.labels

    def refused(self, request: Request, why: str) -> None:
        self.num_refused += 1
        self.first_refusal = self.first_refusal or why

    def step(self, outputs: Sequence[Output], now: float) -> list[Output]:
        """Count the gaps that a step ended, many at once: this runs for every token. Returns the outputs that finish.
        An output without a token is one that ends a request which was to say nothing."""
        said = self._said
        ids = list(map(ID, outputs))
        for before, count in Counter(map(said.get, ids)).items():
            if before is not None:
                self.itl.add(now - before, count)
        said.update(dict.fromkeys(ids, now))
        return list(filter(FINISH, outputs))

    def finished(self, output: Output, request: Request) -> None:
        self.num_finished += 1
        self._said.pop(request.id, None)
        timing, num = output.timing, request.num_generated
        assert timing is not None and timing.scheduled is not None
        self.e2e.add(timing.finished - timing.arrived)
        self.queue.add(timing.scheduled - timing.arrived)
        if timing.first_token is None:  # nothing was to be said
            self.num_good += 1
            return
        ttft = timing.first_token - timing.arrived
        tpot = (timing.finished - timing.first_token) / (num - 1) if num > 1 else 0.0
        self.ttft.add(ttft)
        if num > 1:
            self.tpot.add(tpot)
        labels, target = request.labels, self._target
        meets = ttft <= _wanted(labels, "ttft_target", target.ttft) and tpot <= _wanted(
            labels, "itl_target", target.itl
        )
        self.num_good += meets
        if LABEL in labels:
            self.fairness.finished(labels[LABEL], ttft)

    def wall(self, began: float, entered: float, left: float, ended: float) -> None:
        """When a step began and ended, and the runner in it, on the wall clock; `entered` 0: nothing was run."""
        self._scheduling += (entered or ended) - began
        self._accounting += ended - left if entered else 0.0

    def gauges(self, now: float, engine: Engine) -> None:
        stats = engine.stats
        self._running += stats.num_running
        self._most_running = max(self._most_running, stats.num_running)
        self._most_waiting = max(self._most_waiting, stats.num_waiting)
        self.timeline.add(now, stats.num_waiting, stats.num_running, stats.num_blocks - stats.num_blocks_free)
        if now >= self.fairness.ends:
            self.fairness.look(now, engine.waiting)

    def close(self, now: float, stats: Stats, wall_seconds: float) -> None:
        self.seconds, self.stats, self.wall_seconds = now, stats, wall_seconds

    def summary(self) -> dict[str, Any]:
        """Everything as plain values; the part `wall` alone differs from run to run."""
        stats, seconds, steps = self.stats, self.seconds or 1.0, self.stats.num_steps or 1
        return {
            "requests": {
                "added": self.num_added,
                "finished": self.num_finished,
                "refused": self.num_refused,
                "first_refusal": self.first_refusal or None,
            },
            "seconds": round(self.seconds, 6),
            "offered": None if self.offered is None else round(self.offered, 6),
            "throughput": {
                "requests": round(self.num_finished / seconds, 6),
                "output_tokens": round(stats.generated_tokens / seconds, 6),
                "total_tokens": round((stats.generated_tokens + stats.prompt_tokens) / seconds, 6),
            },
            **{name: getattr(self, name).summary() for name in MEASURES},
            "goodput": {
                "requests": round(self.num_good / seconds, 6),
                "share": round(self.num_good / max(self.num_finished, 1), 6),
                "target_ttft": self._target.ttft,
                "target_itl": self._target.itl,
            },
            "cache": {
                "hit_rate": round(stats.cached_tokens / max(stats.prompt_tokens, 1), 6),
                "cached_tokens": stats.cached_tokens,
                "prompt_tokens": stats.prompt_tokens,
                "blocks": stats.num_blocks,
                "evicted": stats.blocks.evicted,
            },
            "preemptions": {
                "recompute": stats.preemptions_recompute,
                "swap": stats.preemptions_swap,
                "swap_fallbacks": stats.swap_fallbacks,
                "recomputed_tokens": stats.recomputed_tokens,
                "swapped_blocks": stats.swapped_blocks_out + stats.swapped_blocks_in,
            },
            "fairness": self.fairness.summary(),
            "steps": {
                "count": stats.num_steps,
                "mean_running": round(self._running / steps, 3),
                "most_running": self._most_running,
                "most_waiting": self._most_waiting,
            },
            "timeline": self.timeline.columns(),
            "wall": {
                "seconds": round(self.wall_seconds, 3),
                "schedule_us": round(self._scheduling / steps * 1e6, 2),
                "account_us": round(self._accounting / steps * 1e6, 2),
                "other_us": round((self.wall_seconds - self._scheduling - self._accounting) / steps * 1e6, 2),
                "token_us": round(self.wall_seconds / max(stats.generated_tokens, 1) * 1e6, 3),
            },
        }


def _wanted(labels: Mapping[str, str], name: str, otherwise: float | None) -> float:
    """A request's own target, as the scheduler `deadline` reads it, else everybody's; infinity: any time will do."""
    if name in labels:
        with contextlib.suppress(ValueError):
            if (seconds := float(labels[name])) > 0:
                return seconds
    return math.inf if otherwise is None else otherwise
