"""The engine's own counts as Prometheus series, read from its `Stats` when they are scraped. It measures nothing itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from turnout.core.types import EngineInfo, Stats
from turnout.server.engine.bridge import EngineClient

LABELS = ["model_name", "engine"]
Labels = tuple[str, str]
RATE_WINDOW = 5.0  # seconds over which the throughput gauges are taken, at least


class EngineCollector:
    """Asked by the registry at each scrape."""

    def __init__(self, client: EngineClient, labels: Labels, compat: Iterable[str]) -> None:
        self._client, self._labels = client, labels
        self._v0, self._v1 = "v0" in compat, "v1" in compat
        self._prompt_rate, self._generation_rate = Rate(), Rate()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        info, stats, labels = self._client.info, self._client.stats, self._labels
        if self._v1:
            yield from _current(stats, info, labels)
        if self._v0:
            yield from _former(stats, labels, self._prompt_rate, self._generation_rate)
        yield from _own(stats, info, labels)


class Rate:
    """Growth per second of a count over the last window."""

    def __init__(self) -> None:
        self._since, self._count, self._rate = time.monotonic(), 0, 0.0

    def of(self, count: int) -> float:
        now = time.monotonic()
        if now - self._since >= RATE_WINDOW:
            self._rate = (count - self._count) / (now - self._since)
            self._since, self._count = now, count
        return self._rate


def _gauge(name: str, about: str, value: float, labels: Labels) -> Metric:
    family = GaugeMetricFamily(name, about, labels=LABELS)
    family.add_metric(labels, value)
    return family


def _counter(name: str, about: str, value: float, labels: Labels) -> Metric:
    family = CounterMetricFamily(name, about, labels=LABELS)
    family.add_metric(labels, value)
    return family


def _split(name: str, about: str, label: str, values: Mapping[str, float], labels: Labels) -> Metric:
    family = CounterMetricFamily(name, about, labels=[*LABELS, label])
    for value, count in values.items():
        family.add_metric((*labels, value), count)
    return family


def _whole(name: str, about: str, count: int, total: float, labels: Labels) -> Metric:
    """A histogram of which only sum and count are known."""
    family = HistogramMetricFamily(name, about, labels=LABELS)
    family.add_metric(labels, [("+Inf", count)], total)
    return family


def _info(name: str, about: str, facts: Mapping[str, str], labels: Labels) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[*LABELS, *facts])
    family.add_metric((*labels, *facts.values()), 1)
    return family


def _share(free: int, total: int) -> float:
    return 1 - free / total if total else 0.0


def _current(stats: Stats, info: EngineInfo, labels: Labels) -> Iterator[Metric]:
    """Names of vLLM's V1."""
    cache_use = _share(stats.num_blocks_free, stats.num_blocks)
    kept = str(info.composition.get("kv_cache_dtype", "auto"))
    facts = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
    facts |= {"cache_dtype": info.dtype if kept == "auto" else kept, "num_cpu_blocks": str(stats.host_blocks)}
    yield _gauge("vllm:num_requests_running", "Requests that run.", stats.num_running, labels)
    yield _gauge("vllm:num_requests_waiting", "Requests that wait, swapped ones included.", stats.num_waiting, labels)
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", cache_use, labels)
    yield _info("vllm:cache_config_info", "The key/value cache.", facts, labels)
    yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prompt_tokens, labels)
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens, labels)
    yield _counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens, labels)
    yield _counter("vllm:prompt_tokens_cached", "Of these, found in the cache.", stats.cached_tokens, labels)
    yield _counter("vllm:prompt_tokens_recomputed", "Tokens computed again.", stats.recomputed_tokens, labels)
    yield _counter("vllm:generation_tokens", "Tokens generated.", stats.generated_tokens, labels)
    preemptions = stats.preemptions_recompute + stats.preemptions_swap
    yield _counter("vllm:num_preemptions", "Requests put back to wait.", preemptions, labels)
    evicted, age = stats.blocks.evicted, stats.blocks.evicted_age
    about = "From a cached block's last use to its eviction; one bucket."
    yield _whole("vllm:kv_block_idle_before_evict_seconds", about, evicted, age, labels)


def _former(stats: Stats, labels: Labels, prompt_rate: Rate, generation_rate: Rate) -> Iterator[Metric]:
    """Names that dashboards and routers still read, though vLLM dropped them."""
    cache_use = _share(stats.num_blocks_free, stats.num_blocks)
    host_use = _share(stats.host_blocks_free, stats.host_blocks)
    hit_rate = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    prompt, generation = prompt_rate.of(stats.prompt_tokens), generation_rate.of(stats.generated_tokens)
    yield _gauge("vllm:gpu_cache_usage_perc", "Old name of kv_cache_usage_perc.", cache_use, labels)
    yield _gauge("vllm:cpu_cache_usage_perc", "Share of the host's blocks in use, 0 to 1.", host_use, labels)
    yield _gauge("vllm:num_requests_swapped", "Waiting requests in host memory.", stats.num_swapped, labels)
    yield _counter("vllm:gpu_prefix_cache_queries", "Old name of prefix_cache_queries.", stats.prompt_tokens, labels)
    yield _counter("vllm:gpu_prefix_cache_hits", "Old name of prefix_cache_hits.", stats.cached_tokens, labels)
    yield _gauge("vllm:gpu_prefix_cache_hit_rate", "Hits by queries since the start.", hit_rate, labels)
    yield _gauge("vllm:avg_prompt_throughput_toks_per_s", "Prompt tokens a second.", prompt, labels)
    yield _gauge("vllm:avg_generation_throughput_toks_per_s", "Generated tokens a second.", generation, labels)


def _own(stats: Stats, info: EngineInfo, labels: Labels) -> Iterator[Metric]:
    """What no other server tells."""
    names = {"attention": "attention_backend", "blocks": "block_manager", "quant": "quantizer"}
    facts = {names.get(slot, slot): plugin.get("name", "") for slot, plugin in sorted(info.plugins.items())}
    facts["plugin_version"] = ",".join(
        f"{slot}={plugin.get('package', '')} {plugin.get('version', '')}".strip()
        for slot, plugin in sorted(info.plugins.items())
    )
    modes = {"recompute": stats.preemptions_recompute, "swap": stats.preemptions_swap}
    moved = {"out": stats.swapped_blocks_out, "in": stats.swapped_blocks_in}
    yield _info("turnout:engine_plugins_info", "What the engine is made of.", facts, labels)
    yield _split("turnout:preemptions", "Preemptions by what became of the blocks.", "mode", modes, labels)
    yield _split("turnout:swapped_blocks", "Blocks copied to host memory and back.", "direction", moved, labels)
    yield _counter("turnout:swap_fallbacks", "Swaps that became recomputes: no room.", stats.swap_fallbacks, labels)
    yield _counter("turnout:recomputed_tokens", "Tokens computed again.", stats.recomputed_tokens, labels)
    yield _counter("turnout:scheduler_failures", "Steps the scheduler failed in.", stats.scheduler_failures, labels)
    yield _counter("turnout:observer_failures", "Hooks of plugins that raised.", stats.observer_failures, labels)
    blocks = stats.blocks
    evicted = {"room": blocks.evicted - blocks.expired, "expired": blocks.expired}
    tier = {"out": blocks.tier_out, "in": blocks.tier_in}
    age = blocks.evicted_age / blocks.evicted if blocks.evicted else 0.0
    yield _split("turnout:evicted_blocks", "Cached blocks that gave way, by why.", "reason", evicted, labels)
    yield _gauge("turnout:evicted_block_age_seconds", "Mean time from last use to eviction.", age, labels)
    yield _split("turnout:tier_blocks", "Evicted blocks copied to the host and back.", "direction", tier, labels)
    yield _counter("turnout:copied_blocks", "Shared blocks copied to be written.", blocks.copied, labels)
    yield from _grammars(stats, labels)


def _grammars(stats: Stats, labels: Labels) -> Iterator[Metric]:
    forms = stats.grammars
    outcomes = {"compiled": forms.compiled, "reused": forms.reused, "refused": forms.refused, "failed": forms.failed}
    about = "Forms of answers: compiled; there already; refused; not kept to by a sampled token."
    yield _split("turnout:grammars", about, "outcome", outcomes, labels)
    yield _gauge("turnout:num_requests_compiling", "Waiting for their form.", stats.num_compiling, labels)
    yield _counter("turnout:grammar_compile_seconds", "Spent compiling, on threads.", forms.compile_seconds, labels)
    yield _counter("turnout:grammar_masks", "Masks of tokens that may follow.", forms.masks, labels)
    yield _counter("turnout:grammar_mask_seconds", "Spent on these masks.", forms.mask_seconds, labels)
