"""What the server measures of requests, for Prometheus. Names that begin with vllm: are those dashboards already read.

Times to the first token, between tokens and end to end are a client's: from the moment its request was read here to the
moment its tokens came back here. Queue, prefill, decode and inference times are the engine's own, so a request that a
stop string ended has none: the engine never finished it.

Each engine request (one choice, or a whole beam search) is counted once when it begins and once when it ends:
    turnout:requests_received_total = sum over outcomes of turnout:requests_ended_total + requests in flight
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric

from turnout.core.types import Request, Timing
from turnout.server.api.gauges import LABELS, EngineCollector
from turnout.server.engine.bridge import EngineClient

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
MICRO = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
CHOICES = (1, 2, 5, 10, 20, 50, 128)
FINISHED = ("stop", "length")  # outcomes with an answer; the others: abort, error, refused


class Metrics:
    """One per app, with a registry of its own. `compat` says which names go with ours: v0, v1 of vLLM."""

    def __init__(self, client: EngineClient, model_name: str, compat: Iterable[str]) -> None:
        self._client, self._labels = client, (model_name, "0")
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(client, self._labels, compat))
        self._series = Series(self._registry, self._labels, "v0" in compat, "v1" in compat)
        self._last_step = 0
        client.on_step = self.step
        self.in_flight = 0  # engine requests begun and not ended
        self._http = Counter(
            "http_requests", "Replies by route and status.", ["handler", "method", "status"], registry=self._registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "From the request line to the last byte of the reply.",
            ["handler", "method"],
            buckets=SECONDS,
            registry=self._registry,
        )

    def exposition(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._registry)

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a reply."""
        self._http.labels(handler, method, str(status)).inc()
        self._http_seconds.labels(handler, method).observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request that the server would not take."""
        self._series.rejections.labels(*self._labels, reason).inc()

    def called(self, num_calls: int, num_broken: int) -> None:
        """Count the tool calls of an answer, and what was one only at its beginning."""
        self._series.tool_calls.inc(num_calls)
        self._series.broken_calls.inc(num_broken)

    def step(self) -> None:
        """Observe the engine's last step, once."""
        stats = self._client.stats
        if stats.num_steps == self._last_step:
            return  # a report without a step
        self._last_step = stats.num_steps
        if stats.num_steps and stats.step_tokens:
            for histogram in self._series.step_tokens:
                histogram.observe(stats.step_tokens)
            self._series.schedule.observe(stats.schedule_seconds)
            self._series.step.observe(stats.step_seconds)

    def admitted(self, n: int) -> None:
        """Count an HTTP request with `n` choices a prompt."""
        for histogram in self._series.n:
            histogram.observe(n)

    def begin(self, request: Request, num: int, since: float) -> list[InFlight]:
        """Count `num` engine requests like this one."""
        self.in_flight += num
        self._series.received.inc(num)
        return [InFlight(self, self._series, request, since) for _ in range(num)]


class Series:
    """The histograms and counters that are fed request by request. A name that is not wanted is an empty list."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str], v0: bool, v1: bool) -> None:
        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, about, LABELS, buckets=buckets, registry=registry).labels(*labels)

        def compatible(name: str, about: str, buckets: Sequence[float]) -> list[Histogram]:
            return [histogram(f"vllm:{name}", about, buckets)] if v1 else []

        self.ttft = compatible("time_to_first_token_seconds", "From the request to its first token.", SECONDS)
        gaps = Histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of a request.",
            LABELS,
            buckets=SECONDS,
            registry=None,
        )
        self.itl = gaps.labels(*labels)  # one observation for both of its names, since there is one for every token
        for name, wanted in (("inter_token_latency", v1), ("time_per_output_token", v0)):
            if wanted:
                registry.register(Renamed(gaps, f"vllm:{name}_seconds"))
        self.mean_itl = compatible(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", SECONDS
        )
        self.e2e = compatible("e2e_request_latency_seconds", "From a finished request to its last token.", SECONDS)
        self.queue = compatible("request_queue_time_seconds", "Until a request first ran.", SECONDS)
        self.prefill = compatible("request_prefill_time_seconds", "From the first run to the first token.", SECONDS)
        self.decode = compatible("request_decode_time_seconds", "From the first token to the last.", SECONDS)
        self.inference = compatible("request_inference_time_seconds", "From the first run to the last token.", SECONDS)
        self.prompt = compatible("request_prompt_tokens", "Prompt tokens of a finished request.", TOKENS)
        self.generated = compatible("request_generation_tokens", "Tokens a finished request generated.", TOKENS)
        self.computed = compatible(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", TOKENS
        )
        self.max_tokens = compatible("request_params_max_tokens", "The limit on new tokens of a request.", TOKENS)
        self.longest = compatible(
            "request_max_num_generation_tokens", "The most tokens a finished request made.", TOKENS
        )
        self.n = compatible("request_params_n", "Choices asked for.", CHOICES)
        self.step_tokens = compatible("iteration_tokens_total", "Tokens computed in a step that was seen.", TOKENS)
        self.schedule = histogram(
            "turnout:scheduler_decision_seconds", "The scheduler's part of a step that was seen.", MICRO
        )
        self.step = histogram("turnout:step_seconds", "A step that was seen.", MICRO)
        self.received = Counter(
            "turnout:requests_received", "Engine requests begun.", LABELS, registry=registry
        ).labels(*labels)
        ended = Counter(
            "turnout:requests_ended", "Engine requests by outcome.", [*LABELS, "outcome"], registry=registry
        )
        self.ended = {outcome: ended.labels(*labels, outcome) for outcome in (*FINISHED, "abort", "error", "refused")}
        self.tool_calls = Counter(
            "turnout:tool_calls", "Tool calls that models wrote.", LABELS, registry=registry
        ).labels(*labels)
        self.broken_calls = Counter(
            "turnout:tool_calls_broken",
            "Tool calls that models began and broke, given as text.",
            LABELS,
            registry=registry,
        ).labels(*labels)
        about = "Requests refused before the engine saw them."
        self.rejections = Counter("vllm:admission_rejections", about, [*LABELS, "reason"], registry=registry)
        about = "Engine requests that ended, by reason."
        success = Counter("vllm:request_success", about, [*LABELS, "finished_reason"], registry=registry)
        self.success = {reason: success.labels(*labels, reason) for reason in (*FINISHED, "abort", "error")}


class Renamed:
    """A histogram under another name."""

    def __init__(self, histogram: Histogram, name: str) -> None:
        self._histogram, self._name = histogram, name

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for family in self._histogram.collect():
            renamed = Metric(self._name, family.documentation, family.type)
            for sample in family.samples:
                renamed.samples.append(sample._replace(name=sample.name.replace(family.name, self._name, 1)))
            yield renamed


class InFlight:
    """One engine request on its way."""

    __slots__ = ("_first", "_last", "_metrics", "_over", "_request", "_series", "_since")

    def __init__(self, metrics: Metrics, series: Series, request: Request, since: float) -> None:
        self._metrics, self._series, self._request, self._since = metrics, series, request, since
        self._first = self._last = 0.0
        self._over = False

    def tokens_came(self) -> None:
        now = time.monotonic()
        if self._first:
            self._series.itl.observe(now - self._last)
        else:
            self._first = now
            for histogram in self._series.ttft:
                histogram.observe(now - self._since)
        self._last = now

    def ended(self, outcome: str, num_tokens: int = 0, num_cached: int = 0, timing: Timing | None = None) -> None:
        """Harmless when it has ended before: the first outcome counts."""
        if self._over:
            return
        self._over = True
        self._metrics.in_flight -= 1
        series, num_prompt = self._series, self._request.num_prompt
        series.ended[outcome].inc()
        if outcome in series.success:
            series.success[outcome].inc()
        if outcome not in FINISHED:
            return
        observed = [
            (series.e2e, time.monotonic() - self._since),
            (series.prompt, num_prompt),
            (series.generated, num_tokens),
            (series.longest, num_tokens),
            (series.computed, num_prompt - num_cached),
            (series.max_tokens, self._request.sampling.max_tokens),
        ]
        if self._last > self._first:  # else all its tokens came at once
            observed.append((series.mean_itl, (self._last - self._first) / (num_tokens - 1)))
        if timing is not None and timing.scheduled is not None:
            first = timing.finished if timing.first_token is None else timing.first_token
            observed += [
                (series.queue, timing.scheduled - timing.arrived),
                (series.prefill, first - timing.scheduled),
                (series.decode, timing.finished - first),
                (series.inference, timing.finished - timing.scheduled),
            ]
        for histograms, value in observed:
            for histogram in histograms:
                histogram.observe(value)
