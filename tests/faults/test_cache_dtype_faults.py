"""A cache in 8 bits, from the configuration to the tokens: with shared prefixes, copies and swaps at once, and refused
where it can't be had."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import models
import pytest
import torch
from engines import BACKENDS, NO_NATIVE, engine_on, ours, outputs_of, words
from hydra import compose, initialize_config_module
from torch import Tensor

from turnout.compose import plugins
from turnout.compose.build import build_engine
from turnout.compose.config import resolve
from turnout.core import BlockManager, Capabilities, KVSpec, ModelError, Request, Sampling
from turnout.core.engine import Engine
from turnout.kernels import cpu as native
from turnout.plugins.attention.torch_sdpa import TorchAttention
from turnout.plugins.loader import model as loading
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.preemption import Swap
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import serve_all

Tiny = Callable[..., Model]
FORMS = ("int8", "fp8")
SIZE = 4  # tokens a block
kept = pytest.mark.parametrize(
    ("attention", "form"),
    [
        pytest.param(
            name, form, marks=[pytest.mark.skipif(name == "cpu" and NO_NATIVE is not None, reason="no kernels")]
        )
        for name in ("torch", "cpu")
        for form in FORMS
        if form in BACKENDS[name]().capabilities.cache_dtypes
    ],
)


def asked() -> list[Request]:
    """Prompts that begin alike in two families, some going on where another one's prompt ended."""
    found: list[Request] = []
    for family in range(2):
        shared = words(14, seed=family, below=128)
        parent = Request(
            f"{family}-parent", [*shared, *words(5, seed=9 + family, below=128)], Sampling(0, max_tokens=9)
        )
        found.append(parent)
        for i in range(3):
            own = words(3 + i, seed=20 + i, below=128)
            found.append(Request(f"{family}-{i}", [*shared, *own], Sampling(0, max_tokens=8)))
            child = [*parent.tokens, *own[:i]]
            found.append(Request(f"{family}-child-{i}", child, Sampling(0, max_tokens=7), parent=parent.id))
    return found


def alone(model: Model, attention: str, form: str) -> dict[str, list[int]]:
    """What each says in an engine of its own that shares nothing."""
    said = {}
    for request in asked():
        request.parent = None
        engine = engine_on(model, attention=attention, block_size=SIZE, prefix_cache=False, cache_dtype=form)
        said |= serve_all(engine, [request])
    return said


def crowded(model: Model, attention: str, form: str, blocks: BlockManager) -> tuple[Engine, dict[str, list[int]]]:
    """What they say together, in a cache for a few of them, again and again."""
    engine = engine_on(
        model,
        ChunkedPrefill(chunk=7),
        attention=attention,
        blocks=blocks,
        block_size=SIZE,
        num_blocks=22,
        preemption=Swap(30),
        cache_dtype=form,
        max_num_seqs=7,
    )
    serve_all(engine, asked())
    return engine, serve_all(engine, asked())


@kept
@ours("blocks", block_size=SIZE)
def test_shared_prefixes_copies_and_swaps_at_once_change_no_token(
    tiny: Tiny, attention: str, form: str, blocks: Callable[[], BlockManager]
) -> None:
    model = tiny("llama")
    engine, said = crowded(model, attention, form, blocks())
    stats = engine.stats
    assert stats.cached_tokens > 50 and stats.swapped_blocks_in > 10, "nothing was shared, or nothing swapped"
    assert stats.blocks.copied > 2 and stats.blocks.evicted > 10, "nothing was copied, or no block changed hands"
    assert said == alone(model, attention, form)


class ScalesAside(TorchAttention):
    """Keeps the scales outside the cache, where nobody copies or swaps them."""

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, ...]]:
        caches = super().allocate(spec, dtype, device)
        self._aside = {cache[0].data_ptr(): cache[2:] for cache in caches}
        return [cache[:2] for cache in caches]

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, ...], plan: Any, sinks: Tensor | None
    ) -> Tensor:
        return super().run(q, k, v, (*cache, *self._aside[cache[0].data_ptr()]), plan, sinks)


def test_scales_that_do_not_move_with_their_blocks_would_show(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    monkeypatch.setitem(BACKENDS, "aside", ScalesAside)
    model = tiny("llama")
    make = next(partial(c.component, block_size=SIZE) for c in plugins.load().choices.values() if c.name == "paged")
    _, said = crowded(model, "aside", "int8", make())
    assert said != alone(model, "aside", "int8")


@kept
@pytest.mark.parametrize(
    ("architecture", "options"), [("llama", {}), ("gemma2", {}), ("gpt_oss", {}), ("deepseek_v3", {}), ("mistral", {})]
)
def test_its_answers_are_near_those_of_the_whole_numbers(
    tiny: Tiny, attention: str, form: str, architecture: str, options: dict[str, Any]
) -> None:
    """Windows, softcap, sinks and value sizes too: prompts whole and in chunks say the same, and about what they say with
    a cache in the model's dtype."""
    model = tiny(architecture, **options)
    prompt = words(40, seed=5, below=128)

    def scores(cache_dtype: str, scheduler: Any) -> list[float]:
        engine = engine_on(model, scheduler, attention=attention, block_size=SIZE, cache_dtype=cache_dtype)
        request = Request("a", list(prompt), Sampling(0, max_tokens=1, prompt_logprobs=0))
        return [mark.logprob for output in outputs_of(engine, [request])["a"] for mark in output.prompt_logprobs]

    whole, chunked = scores(form, FCFS()), scores(form, ChunkedPrefill(chunk=6))
    assert chunked == pytest.approx(whole, abs=5e-3)  # another last bit may be another code
    exact = scores("auto", FCFS())
    off = [abs(a - b) for a, b in zip(whole, exact, strict=True)]
    assert 0 < max(off) and sum(off) / len(off) < {"int8": 0.1, "fp8": 0.4}[form]


@kept
def test_what_a_request_that_failed_left_reaches_nobody(tiny: Tiny, attention: str, form: str) -> None:
    model = load(inspect(tiny("llama").info.path, dtype="float32", device="cpu"), Unquantized())
    with torch.inference_mode():
        embedding = next(m for m in model._net.modules() if isinstance(m, torch.nn.Embedding))
        embedding.weight[77] = math.nan
    good = [words(n, seed=n, below=60) for n in (3, 9, 20)]

    def said(engine: Engine) -> dict[str, list[int]]:
        return serve_all(engine, [Request(str(i), list(p), Sampling(0, max_tokens=6)) for i, p in enumerate(good)])

    engine = engine_on(model, attention=attention, block_size=8, num_blocks=16, cache_dtype=form)
    for n in (1, 30):
        found = outputs_of(engine, [Request("bad", [*words(n, below=60), 77, 5], Sampling(0))])
        assert "NaN" in str(found["bad"][-1].error)
        fresh = engine_on(model, attention=attention, block_size=8, num_blocks=16, cache_dtype=form)
        assert said(engine) == said(fresh)


class TestFromTheConfiguration:
    @pytest.fixture
    def build(self, tmp_path: Path) -> Callable[..., Engine]:
        plugins.load()
        folder = models.save("llama", tmp_path, hidden_size=128, num_attention_heads=2, num_key_value_heads=2)

        def make(*overrides: str) -> Engine:
            with initialize_config_module("turnout.conf", version_base=None):
                return build_engine(resolve(compose("serve", [f"model='{folder}'", *overrides])))

        return make

    @pytest.mark.parametrize("form", FORMS)
    def test_a_block_takes_a_quarter_of_its_bytes_and_there_are_four_times_as_many(
        self, build: Callable[..., Engine], form: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Heads of 64 in float32: 68 bytes a token and head instead of 256; in bfloat16, instead of 128."""
        from turnout.plugins.runner import memory

        monkeypatch.setattr(memory, "free_memory", lambda *_: (20 << 20) + native.SCRATCH)  # bytes
        for dtype, bytes_each in (("float32", 256), ("bfloat16", 128)):
            usual = build("attention=torch", f"dtype={dtype}").info.num_blocks
            small = build("attention=torch", f"dtype={dtype}", f"kv_cache_dtype={form}").info
            assert small.num_blocks == pytest.approx(usual * bytes_each / 68, rel=0.05)
            assert small.composition["kv_cache_dtype"] == form

    def test_auto_takes_a_backend_that_keeps_it_and_says_so(self, build: Callable[..., Engine]) -> None:
        info = build("kv_cache_dtype=fp8", "blocks.num_blocks=8").info
        name = info.plugins["attention"]["name"]
        found = plugins.load()
        chosen: Any = found.get("attention", name).component
        assert "fp8" in chosen.capabilities.cache_dtypes
        assert f"attention=auto chose {name}" in str(info.notes)

    @pytest.mark.parametrize("wrong", ["int4", "fp16", "FP8", "8", "none"])
    def test_a_form_there_is_none_of_is_refused_before_weights_load_with_those_there_are(
        self, build: Callable[..., Engine], wrong: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("weights were read"))
        for override in ("attention=auto", "attention=torch"):
            with pytest.raises(ModelError, match=f"kv_cache_dtype is {wrong}, it keeps auto, fp8, int8"):
                build(override, f"kv_cache_dtype={wrong}")

    def test_a_backend_without_it_is_refused_with_what_would_work(
        self, build: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from turnout.plugins.attention.cpu import CpuAttention

        can: ClassVar[Capabilities] = Capabilities(devices=frozenset({"cpu"}))
        monkeypatch.setattr(CpuAttention, "capabilities", can)
        with pytest.raises(ModelError, match=r"attention=cpu cannot serve .*kv_cache_dtype is int8.* work: .*torch"):
            build("attention=cpu", "kv_cache_dtype=int8")

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
    def test_it_goes_with_every_dtype(self, build: Callable[..., Engine], form: str, dtype: str) -> None:
        engine = build("attention=torch", f"dtype={dtype}", f"kv_cache_dtype={form}", "blocks.num_blocks=8")
        assert engine.info.dtype == dtype
        found = serve_all(engine, [Request("a", words(20, below=128), Sampling(0, max_tokens=5))])
        assert len(found["a"]) == 5

    def test_two_forms_never_pass_for_one_stack(self, build: Callable[..., Engine]) -> None:
        options = ("attention=torch", "blocks.num_blocks=8")
        names = {build(*options, f"kv_cache_dtype={form}").info.fingerprint for form in ("auto", *FORMS)}
        assert len(names) == 3
