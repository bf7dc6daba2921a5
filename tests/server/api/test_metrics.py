"""Metrics: every name a dashboard reads, each request counted once, times that are plausible."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from callers import BOTH, Api, until
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedEngine

from turnout.core.types import BlockStats, Stats
from turnout.server.engine.bridge import EngineError

LABELS = {"model_name": "models/smol", "engine": "0"}

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
COUNTERS = {
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_recomputed_total",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "iteration_tokens_total",
    "kv_block_idle_before_evict_seconds",
}
FORMER = {
    "gpu_cache_usage_perc",
    "cpu_cache_usage_perc",
    "num_requests_swapped",
    "gpu_prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total",
    "gpu_prefix_cache_hit_rate",
    "avg_prompt_throughput_toks_per_s",
    "avg_generation_throughput_toks_per_s",
}


class Page:
    """A scrape."""

    def __init__(self, api: Api) -> None:
        reply = api.get("/metrics")
        assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain")
        self.families = {family.name: family for family in text_string_to_metric_families(reply.raw.decode())}
        self.samples = [sample for family in self.families.values() for sample in family.samples]
        self.names = {sample.name for sample in self.samples}

    def value(self, name: str, **labels: str) -> float:
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, name
        return sum(found)


def test_every_name_is_there_before_the_first_request(api: Api) -> None:
    page = Page(api)
    for names, kind, ending in ((GAUGES, "gauge", ""), (COUNTERS, "counter", ""), (HISTOGRAMS, "histogram", "_count")):
        for name in names:
            assert f"vllm:{name}{ending}" in page.names
            family = name.removesuffix("_total") if kind == "counter" else name
            assert page.families[f"vllm:{family}"].type == kind
    assert page.value("vllm:request_success_total", finished_reason="stop") == 0


def test_every_series_of_the_engine_says_which_model_and_engine(api: Api) -> None:
    api.complete()
    for sample in Page(api).samples:
        if sample.name.startswith(("vllm:", "turnout:")):
            assert LABELS.items() <= sample.labels.items(), sample


def test_old_and_new_names_can_be_left_out(api_with: Callable[..., Api]) -> None:
    both, new, old = (Page(api_with(metrics_compat=compat)) for compat in (["v0", "v1"], ["v1"], ["v0"]))
    former = {f"vllm:{name}" for name in FORMER} | {"vllm:time_per_output_token_seconds_count"}
    current = {f"vllm:{name}" for name in GAUGES | COUNTERS} | {f"vllm:{name}_count" for name in HISTOGRAMS}
    assert former | current <= both.names
    assert current <= new.names and not former & new.names
    assert former <= old.names and not current & old.names
    assert all("turnout:recomputed_tokens_total" in page.names for page in (both, new, old))


def test_gauges_and_counters_are_the_engines(api: Api, engine: ScriptedEngine) -> None:
    engine.stats = Stats(
        num_running=3,
        num_waiting=2,
        num_swapped=1,
        num_blocks=400,
        num_blocks_free=100,
        host_blocks=10,
        host_blocks_free=4,
        prompt_tokens=1000,
        cached_tokens=250,
        generated_tokens=77,
        preemptions_recompute=4,
        preemptions_swap=5,
        recomputed_tokens=66,
        swapped_blocks_out=8,
        swapped_blocks_in=7,
        blocks=BlockStats(copied=11, evicted=20, expired=5, evicted_age=50.0, tier_out=9, tier_in=3),
    )
    page = Page(api)
    for name, value in {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:num_requests_swapped": 1,
        "vllm:kv_cache_usage_perc": 0.75,
        "vllm:gpu_cache_usage_perc": 0.75,
        "vllm:cpu_cache_usage_perc": 0.6,
        "vllm:prompt_tokens_total": 1000,
        "vllm:prefix_cache_queries_total": 1000,
        "vllm:prefix_cache_hits_total": 250,
        "vllm:gpu_prefix_cache_hit_rate": 0.25,
        "vllm:generation_tokens_total": 77,
        "vllm:num_preemptions_total": 9,
        "turnout:recomputed_tokens_total": 66,
        "turnout:copied_blocks_total": 11,
        "turnout:evicted_block_age_seconds": 2.5,
        "vllm:kv_block_idle_before_evict_seconds_sum": 50.0,
        "vllm:kv_block_idle_before_evict_seconds_count": 20,
    }.items():
        assert page.value(name) == pytest.approx(value), name
    assert page.value("turnout:preemptions_total", mode="recompute") == 4
    assert page.value("turnout:preemptions_total", mode="swap") == 5
    assert page.value("turnout:swapped_blocks_total", direction="out") == 8
    assert page.value("turnout:swapped_blocks_total", direction="in") == 7
    assert page.value("turnout:evicted_blocks_total", reason="room") == 15
    assert page.value("turnout:evicted_blocks_total", reason="expired") == 5
    assert page.value("turnout:tier_blocks_total", direction="out") == 9
    assert page.value("turnout:tier_blocks_total", direction="in") == 3


def test_info_series_are_one_and_say_what_is_served(api: Api) -> None:
    page = Page(api)
    assert page.value("vllm:cache_config_info", block_size="16", num_gpu_blocks="400", cache_dtype="float32") == 1
    assert (
        page.value("turnout:engine_plugins_info", attention_backend="torch", plugin_version="attention=turnout 0.1")
        == 1
    )


@pytest.mark.parametrize("stream", [False, True])
def test_each_request_is_counted_once_whatever_becomes_of_it(api: Api, engine: ScriptedEngine, stream: bool) -> None:
    fields = {"max_tokens": 5, "stream": stream}
    api.complete(["a", "b"], n=2, **fields)  # 4 end by length
    api.chat(stop_token_ids=[engine.story[2]], **fields)  # stop
    api.complete(stop=[" and"], **fields)  # a stop string: stop
    api.complete(temperature=9)  # never begun
    for fault, after in (("NaN", 0), ("NaN", 2), (EngineError("gone"), 2), (ValueError("too long"), 0)):
        engine.fails_with, engine.fails_after = fault, after
        api.complete(n=2, **fields)
    page = Page(api)
    ended = {
        o: page.value("turnout:requests_ended_total", outcome=o)
        for o in ("stop", "length", "abort", "error", "refused")
    }
    assert (ended["length"], ended["stop"]) == (4, 2)
    assert ended["error"] >= 3 and ended["refused"] >= 1  # the sibling of one that failed is aborted, or failed too
    assert sum(ended.values()) == page.value("turnout:requests_received_total") == 4 + 2 + 8
    for reason in ("stop", "length", "abort", "error"):
        assert page.value("vllm:request_success_total", finished_reason=reason) == ended[reason]
    assert page.value("vllm:e2e_request_latency_seconds_count") == 6
    assert page.value("vllm:request_generation_tokens_sum") == 4 * 5 + 3 + 2
    assert api.get("/load").good == {"server_load": 0}


def test_a_client_that_leaves_is_one_abort(api: Api, engine: ScriptedEngine, url: str) -> None:
    engine.pace = 0.005
    body = {"prompt": "a", "max_tokens": 1000, "stream": True, "n": 2}
    with httpx.stream("POST", f"{url}{BOTH[0]}", json=body, timeout=20) as reply:
        next(reply.iter_raw())
    until(lambda: len(engine.left) == 2)

    def aborted() -> bool:
        return (
            'turnout:requests_ended_total{engine="0",model_name="models/smol",outcome="abort"} 2.0'
            in httpx.get(f"{url}/metrics").text
        )

    until(aborted)


def test_a_whole_answer_nobody_waited_for_is_counted_as_499(engine: ScriptedEngine, url: str) -> None:
    engine.pace = 0.01
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}{BOTH[0]}", json={"prompt": "a", "max_tokens": 1000}, timeout=0.2)
    line = f'http_requests_total{{handler="{BOTH[0]}",method="POST",status="499"}} 1.0'
    until(lambda: line in httpx.get(f"{url}/metrics").text)


def test_times_add_up(api: Api, engine: ScriptedEngine) -> None:
    engine.before_first, engine.pace = 0.05, 0.01
    api.complete(max_tokens=5)
    page = Page(api)
    assert page.value("vllm:time_to_first_token_seconds_count") == 1
    assert (
        page.value("vllm:inter_token_latency_seconds_count")
        == page.value("vllm:time_per_output_token_seconds_count")
        == 4
    )
    first, gaps = page.value("vllm:time_to_first_token_seconds_sum"), page.value("vllm:inter_token_latency_seconds_sum")
    whole = page.value("vllm:e2e_request_latency_seconds_sum")
    assert 0.05 < first < whole and gaps >= 0.04 and first + gaps == pytest.approx(whole, abs=0.1)
    assert page.value("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(gaps / 4)
    parts = [
        page.value(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode", "inference")
    ]
    assert parts[0] >= 0.05 and parts[1] + parts[2] == pytest.approx(parts[3])
    assert page.value("vllm:request_params_max_tokens_sum") == 5


def test_a_step_is_observed_once(api: Api, engine: ScriptedEngine) -> None:
    engine.stats = Stats(num_steps=1, step_tokens=32, step_seconds=0.02, schedule_seconds=0.0001)
    engine.on_step()
    engine.on_step()  # a report without a new step
    for _ in range(3):
        page = Page(api)
    assert page.value("vllm:iteration_tokens_total_count") == 1 and page.value("vllm:iteration_tokens_total_sum") == 32
    assert page.value("turnout:scheduler_decision_seconds_sum") == pytest.approx(0.0001)
    assert page.value("turnout:step_seconds_sum") == pytest.approx(0.02)


def test_refusals_are_counted_by_reason(api_with: Callable[..., Api], engine: ScriptedEngine) -> None:
    engine.pace = 0.05
    api = api_with(max_queue=1)  # and 4 seats in the scripted engine
    api.together([("POST", BOTH[0], {"json": {"prompt": "a", "max_tokens": 5}})] * 7)
    engine.broken = "draining"
    api.complete()
    page = Page(api)
    assert page.value("vllm:admission_rejections_total", reason="queue_full") == 2
    assert page.value("vllm:admission_rejections_total", reason="unavailable") == 1


def test_replies_are_counted_by_route_and_unknown_paths_together(api: Api) -> None:
    api.complete()
    api.complete(temperature=9)
    for i in range(5):
        api.get(f"/nowhere/{i}")
    page = Page(api)
    assert page.value("http_requests_total", handler=BOTH[0], method="POST", status="200") == 1
    assert page.value("http_requests_total", handler=BOTH[0], method="POST", status="400") == 1
    assert page.value("http_requests_total", handler="none", status="404") == 5
    assert page.value("http_request_duration_seconds_count", handler=BOTH[0]) == 2
