"""On the real model in float32, greedy tokens are transformers' own, whatever the engine did on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from turnout.core import BlockManager, Draft, Preemption, PreemptMode, Request, RequestView, Sampling, Scheduler
from turnout.core.engine import Engine
from turnout.core.types import KVSpec
from turnout.kernels import cpu as native
from turnout.plugins.attention.cpu import CpuAttention
from turnout.plugins.attention.torch_sdpa import TorchAttention
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.runner import LocalRunner
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import check_balance, make_engine, serve_all

pytestmark = pytest.mark.timeout(1200)  # the real model; a busy machine takes its time
NUM_TOKENS = 12
LIMIT = 256  # the context of these tests
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n: int) -> int:\n    ",
    "for (int i = 0; i < n; i++) {\n    sum += a[i];\n}\nreturn",
    "今天天气很好，我们去",
    "机器学习是人工智能的一个分支，它",
    "🙂🚂🛤️ trains and tracks 🚦",
    "SELECT name, COUNT(*) FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "1, 1, 2, 3, 5, 8, 13,",
    "Ärger über öffentliche Verkehrsmittel gibt es",
    "Q: What is 17 + 25?\nA:",
    "<|im_start|>user\nWho wrote Hamlet?<|im_end|>\n<|im_start|>assistant\n",
    "\n\n\n",
]


@pytest.fixture(scope="module")
def prompts(smollm2: str) -> list[list[int]]:
    """Sixteen: the texts above, one of a single token, one that just fits the context."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    found = [tokenizer.encode(text) for text in TEXTS]
    long = tokenizer.encode("In the beginning the library had no door, only a long and quiet wall. " * 40)
    return [*found, [28120], long[: LIMIT - NUM_TOKENS]]


@pytest.fixture(scope="module")
def truth(smollm2: str) -> Callable[[list[int]], list[int]]:
    """What `generate` of transformers says to one prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    settings = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 2}

    def answer(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])  # the mask is given: else every <|im_end|> of a prompt counts as padding
        said = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **settings)
        return list(said[0, len(prompt) :].tolist())

    return answer


@pytest.fixture(scope="module")
def expected(truth: Callable[[list[int]], list[int]], prompts: list[list[int]]) -> list[list[int]]:
    return [truth(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def model(smollm2: str) -> Model:
    return load(inspect(smollm2, dtype="float32", device="cpu"), Unquantized())


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(model: Model) -> Make:
    """An engine on the real model; the fake one's runner is exchanged."""

    def build(
        scheduler: Scheduler | None = None,
        num_blocks: int = 512,
        block_size: int = 16,
        preemption: Preemption | None = None,
        blocks: BlockManager | None = None,
        attention: Any = None,
        **budgets: Any,
    ) -> Engine:
        policy = preemption or Recompute()
        engine = make_engine(
            scheduler or FCFS(),
            num_blocks=num_blocks,
            block_size=block_size,
            preemption=policy,
            blocks=blocks or PagedBlocks(block_size),
            **({"max_num_batched_tokens": 2048, "max_num_seqs": 16, "max_model_len": LIMIT} | budgets),
        )
        spec = KVSpec(model.info.layers, block_size, num_blocks)
        device = torch.device("cpu")
        backend = attention or TorchAttention()
        engine._runner = runner = LocalRunner()
        runner.start(model, backend, spec, torch.float32, device, policy.num_host_blocks)
        engine.info = _with_vocab(engine.info, model.info.vocab_size)
        return engine

    return build


def _with_vocab(info: Any, vocab_size: int) -> Any:
    from dataclasses import replace

    return replace(info, vocab_size=vocab_size)


def asked(prompts: Sequence[list[int]]) -> list[Request]:
    return [Request(str(i), list(p), Sampling(0, max_tokens=NUM_TOKENS)) for i, p in enumerate(prompts)]


def answers(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    return list(serve_all(engine, asked(prompts)).values())


def test_four_prompts_whatever_befalls_them(
    make: Make, prompts: list[list[int]], truth: Callable[[list[int]], list[int]]
) -> None:
    """On the backend that `attention=auto` takes here: in chunks, preempted, swapped and recomputed, then cached."""
    four = [prompts[0], prompts[4], prompts[8], prompts[12]]
    expected = [truth(prompt) for prompt in four]
    attention = CpuAttention() if native.obstacle() is None else TorchAttention()
    engine = make(Fickle(5), num_blocks=14, block_size=8, preemption=Swap(host_blocks=10), attention=attention)
    for _ in range(3):
        assert answers(engine, four) == expected
    stats = engine.stats
    assert min(stats.preemptions_swap, stats.preemptions_recompute, stats.cached_tokens) > 0


@pytest.mark.slow
def test_alone_and_together_and_cached(make: Make, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = make()
    assert [answers(engine, [prompt])[0] for prompt in prompts] == expected  # one at a time, cold
    assert engine.stats.cached_tokens < 64
    assert answers(engine, prompts) == expected  # sixteen together, warm
    assert engine.stats.cached_tokens > 300


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 31, 33])
def test_prompts_in_chunks(make: Make, prompts: list[list[int]], expected: list[list[int]], chunk: int) -> None:
    some = slice(None) if chunk > 1 else slice(0, 6)
    assert answers(make(ChunkedPrefill(chunk=chunk, max_prefill_tokens=200)), prompts[some]) == expected[some]


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 32])
def test_block_sizes(make: Make, prompts: list[list[int]], expected: list[list[int]], block_size: int) -> None:
    assert answers(make(block_size=block_size), prompts) == expected


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [FCFS(), ChunkedPrefill(chunk=40)], ids=["fcfs", "chunked_prefill"])
@pytest.mark.parametrize("preemption", [Recompute(), Swap(host_blocks=40)], ids=["recompute", "swap"])
def test_preempted_in_a_cache_for_about_three_of_eight(
    make: Make, prompts: list[list[int]], expected: list[list[int]], scheduler: Scheduler, preemption: Recompute | Swap
) -> None:
    eight = [p * 3 for p in prompts[:7]] + [prompts[8]]
    wanted = answers(make(scheduler, num_blocks=512), eight)
    needed = [-(-(len(p) + NUM_TOKENS) // 8) for p in eight]
    room = sum(sorted(needed)[-3:])
    engine = make(
        scheduler, num_blocks=room, block_size=8, preemption=preemption, blocks=PagedBlocks(8, prefix_cache=False)
    )
    assert answers(engine, eight) == wanted
    stats = engine.stats
    assert stats.preemptions_recompute + stats.preemptions_swap > 0
    if isinstance(preemption, Swap):
        assert stats.preemptions_swap > 0 and stats.swapped_blocks_in > 0


class Fickle:
    """Shuffles, takes random chunks, preempts at random."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
        pool = [*running, *waiting]
        self.dice.shuffle(pool)
        for request in pool:
            if request in running and self.dice.random() < 0.08:
                draft.preempt(request, self.dice.choice([PreemptMode.SWAP, PreemptMode.RECOMPUTE]))
            else:
                draft.take(request, self.dice.choice([1, 5, 16, 17, 64]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_fickle_scheduler(make: Make, prompts: list[list[int]], expected: list[list[int]], seed: int) -> None:
    engine = make(Fickle(seed), num_blocks=60, preemption=Swap(host_blocks=20))
    assert answers(engine, prompts) == expected


@pytest.mark.slow
@pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}")
def test_the_native_backend_whole_chunked_cached_and_swapped(
    make: Make, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = make(ChunkedPrefill(chunk=33), attention=CpuAttention())
    assert answers(engine, prompts) == expected
    assert answers(engine, prompts) == expected  # warm
    tight = make(Fickle(5), num_blocks=60, preemption=Swap(host_blocks=20), attention=CpuAttention())
    assert answers(tight, prompts) == expected
    assert tight.stats.preemptions_swap > 0


@pytest.mark.slow
def test_swapped_blocks_come_back_bit_for_bit(make: Make, prompts: list[list[int]]) -> None:
    engine = make(num_blocks=40, preemption=Swap(host_blocks=20))
    request = asked(prompts[8:9])[0]
    engine.add(request)
    for _ in range(3):
        engine.step()
    before = [t[list(request.blocks)].clone() for t in engine._runner._layers.tensors()]  # type: ignore[attr-defined]

    class Once:
        def __init__(self) -> None:
            self.out = True

        def schedule(self, waiting: Sequence[RequestView], running: Sequence[RequestView], draft: Draft) -> None:
            if self.out:
                draft.preempt(running[0])
            else:
                draft.take(waiting[0])
            self.out = False

    engine._scheduler = Once()
    engine.step()
    assert not request.blocks and engine.stats.num_swapped == 1
    for cache in engine._runner._layers.tensors():  # type: ignore[attr-defined]
        cache.fill_(float("nan"))
    computed = request.num_computed
    engine.step()
    check_balance(engine)
    size = engine.info.block_size
    for cache, old in zip(engine._runner._layers.tensors(), before, strict=True):  # type: ignore[attr-defined]
        now = cache[list(request.blocks)].flatten(0, 1)[:computed]
        assert torch.equal(now, old.flatten(0, 1)[:computed]), f"block size {size}"


@pytest.mark.slow
def test_seeds_reproduce_whatever_the_neighbours_do(make: Make, prompts: list[list[int]]) -> None:
    def seeded(i: int) -> Request:
        return Request(f"seeded{i}", list(prompts[0]), Sampling(0.9, top_p=0.95, seed=42, max_tokens=NUM_TOKENS))

    alone = serve_all(make(), [seeded(0)])["seeded0"]
    neighbours = [Request(f"n{i}", list(p), Sampling(1.3, max_tokens=NUM_TOKENS)) for i, p in enumerate(prompts[:5])]
    for order in ([seeded(1), *neighbours], [*neighbours, seeded(1)]):
        fresh = [Request(r.id, list(r.tokens[: r.num_prompt]), r.sampling) for r in order]
        assert serve_all(make(), fresh)["seeded1"] == alone
    squeezed = [Request(r.id, list(r.tokens[: r.num_prompt]), r.sampling) for r in [*neighbours, seeded(1)]]
    engine = make(Fickle(1), num_blocks=20)
    assert serve_all(engine, squeezed)["seeded1"] == alone


@pytest.mark.slow
def test_prompt_scores_equal_one_plain_forward_pass_cold_and_warm(
    make: Make, smollm2: str, prompts: list[list[int]]
) -> None:
    from transformers import AutoModelForCausalLM

    prompt = prompts[8]
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    engine = make(ChunkedPrefill(chunk=20))
    serve_all(engine, [Request("warm", list(prompt), Sampling(0, max_tokens=1))])
    for rid in ("cold", "warm again"):
        engine.add(Request(rid, list(prompt), Sampling(0, max_tokens=1, prompt_logprobs=2)))
        marks = []
        while engine.busy:
            for output in engine.step():
                marks += output.prompt_logprobs
        assert [m.token for m in marks] == prompt[1:]
        assert torch.allclose(torch.tensor([m.logprob for m in marks]), wanted, atol=2e-4)
        assert all(len(m.top) == 2 for m in marks)
