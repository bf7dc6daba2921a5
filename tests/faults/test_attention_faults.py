"""Faults other engines had in attention: each trigger on every backend, whole models against transformers' eager code."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from engines import BACKENDS, backends, engine_on, outputs_of, words
from hydra import compose, initialize_config_module
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnout.compose import plugins
from turnout.compose.build import build_engine
from turnout.compose.config import resolve
from turnout.core import Batch, Capabilities, Chunk, KVSpec, LayerSpec, ModelError, Request, Sampling
from turnout.kernels import cpu as native
from turnout.plugins.attention.cpu import CpuAttention
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.runner.layout import flatten
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.server.cli.overrides import Usage, try_composing
from turnout.testing import AttentionCase, attention_oracle, check_attention
from turnout.testing.attention import compared
from turnout.testing.attention_scene import Scene

Tiny = Callable[..., Model]


def assert_equal_to_eager(model: Model, attention: str, prompts: Sequence[Sequence[int]], num_tokens: int = 9) -> None:
    """Every token the engine makes, prompts whole and in chunks, is the likeliest of transformers' eager code after the
    tokens before it, with the same log-probability."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model.info.path, dtype=torch.float32, attn_implementation="eager")
    for scheduler in (FCFS(), ChunkedPrefill(chunk=5)):
        asked = [
            Request(str(i), list(p), Sampling(0, max_tokens=num_tokens, logprobs=0)) for i, p in enumerate(prompts)
        ]
        found = outputs_of(engine_on(model, scheduler, attention=attention, block_size=4, num_blocks=256), asked)
        for request in asked:
            marks = [mark for output in found[request.id] for mark in output.logprobs]
            with torch.inference_mode():
                logits = net(input_ids=torch.tensor([request.tokens[:-1]])).logits[0].log_softmax(-1)
            expected = logits[request.num_prompt - 1 :].max(-1)
            assert [mark.token for mark in marks] == expected.indices.tolist()
            assert [mark.logprob for mark in marks] == pytest.approx(expected.values.tolist(), abs=1e-4)


def assert_right(attention: str, layer: LayerSpec, *lens: tuple[int, int]) -> None:
    """At most twice the error of plain PyTorch, in each form of the cache the backend keeps."""
    backend = BACKENDS[attention]
    for form in ("auto", *sorted(backend().capabilities.cache_dtypes)):
        check_attention(backend(), AttentionCase("one", layer, lens, block_size=4, cache_dtype=form))


class TestMasks:
    @backends
    def test_a_window_of_8_is_8_keys_the_tokens_own_included(self, tiny: Tiny, attention: str) -> None:
        model = tiny("mistral", sliding_window=8)
        assert {layer.window for layer in model.info.layers} == {8}
        assert_equal_to_eager(model, attention, [words(n, seed=n, below=128) for n in (1, 7, 8, 9, 20)])

    @backends
    @pytest.mark.parametrize("window", [None, 3])
    def test_a_later_chunk_sees_all_that_came_before_it(self, attention: str, window: int | None) -> None:
        layer = LayerSpec(4, 2, 32, 0.2, window=window)
        for queries in range(1, 10):
            assert_right(attention, layer, (queries, 9))
        assert_right(attention, layer, *((queries, 9) for queries in range(1, 10)))

    @backends
    @pytest.mark.parametrize("features", [{}, {"softcap": 3.0}, {"window": 1}], ids=str)
    def test_rows_that_see_no_key_are_zero_and_the_others_right(self, attention: str, features: dict[str, Any]) -> None:
        """Three requests: 4 queries but 2 keys, a query without any key, and an ordinary prompt."""
        layer, size = LayerSpec(4, 2, 32, 0.2, **features), 4
        lens = [(4, 2), (1, 0), (3, 3)]
        q, k, v = (torch.randn(8, heads, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
        batch = Batch(
            tokens=torch.zeros(8, dtype=torch.int64),
            positions=torch.tensor([0, 1, 2, 3, 0, 0, 1, 2]),
            slots=torch.tensor([4, 5, 6, 7, 8, 12, 13, 14]),
            block_table=torch.tensor([[1], [2], [3]], dtype=torch.int32),
            query_start=torch.tensor([0, 4, 5, 8], dtype=torch.int32),
            kv_lens=torch.tensor([2, 0, 3], dtype=torch.int32),
            logit_rows=torch.tensor([3, 4, 7]),
            query_lens_host=(4, 1, 3),
            kv_lens_host=(2, 0, 3),
        )
        backend = BACKENDS[attention]()
        (cache,) = backend.allocate(KVSpec((layer,), size, 4), torch.float32, torch.device("cpu"))
        with fresh_memory_is_nan():
            out = backend.run(q, k, v, cache, backend.plan(batch, layer, size), None)
        starts = [0, 4, 5]
        for (queries, keys), start in zip(lens, starts, strict=True):
            rows, seen = slice(start, start + queries), slice(start, start + keys)
            torch.testing.assert_close(
                out[rows].double(), attention_oracle(q[rows], k[seen], v[seen], layer, None), atol=1e-5, rtol=1e-4
            )
        assert not out[:2].any() and not out[4].any()


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """An output buffer holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class TestShapes:
    @backends
    @pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (10, 2), (6, 1), (7, 1), (16, 1), (71, 1)])
    def test_any_number_of_heads_may_share_a_key_head(
        self, tiny: Tiny, attention: str, heads: int, kv_heads: int
    ) -> None:
        model = tiny(
            "llama",
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            hidden_size=8 * heads,
            initializer_range=0.05,
        )
        assert_equal_to_eager(model, attention, [words(n, seed=n, below=128) for n in (3, 12, 30)])

    @backends
    @pytest.mark.parametrize("group", [48, 49, 128])
    def test_groups_larger_than_a_kernels_tile_are_right(self, attention: str, group: int) -> None:
        for lens in (((5, 9), (1, 3)), ((20, 20),), ((1, 1100),)):
            assert_right(attention, LayerSpec(group, 1, 16, 0.25), *lens)

    @backends
    @pytest.mark.parametrize("dim", [40, 80, 96, 160, 192])
    def test_any_head_size_keeps_its_own_scale(self, tiny: Tiny, attention: str, dim: int) -> None:
        model = tiny("llama", head_dim=dim, num_hidden_layers=2)
        assert {layer.scale for layer in model.info.layers} == {dim**-0.5}
        assert_equal_to_eager(model, attention, [words(n, seed=n, below=128) for n in (5, 14)])

    @backends
    def test_a_cache_of_more_than_2_to_the_31_elements_is_addressed_right(self, attention: str) -> None:
        """Memory is only reserved: the pages nobody touches take none."""
        layer, size = LayerSpec(2, 1, 64, 0.125), 16
        num_blocks = 2**31 // (size * 64) + 8
        try:
            sides = [
                mmap.mmap(-1, num_blocks * size * 64 * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
                for _ in range(2)  # 0x4000: MAP_NORESERVE
            ]
        except OSError as error:
            pytest.skip(f"8 GiB of addresses can't be had: {error}")
        cache = tuple(torch.frombuffer(s, dtype=torch.float32).view(num_blocks, size, 1, 64) for s in sides)
        backend = BACKENDS[attention]()
        backend.allocate(KVSpec((layer,), size, 1), torch.float32, torch.device("cpu"))
        q, k, v = (torch.randn(20, heads, 64, generator=torch.Generator().manual_seed(heads)) for heads in (2, 1, 1))
        table = [num_blocks - 2, num_blocks - 5]
        slots = torch.tensor([table[i // size] * size + i % size for i in range(20)])
        assert int(slots.min()) * 64 > 2**31

        def call(first: int, end: int) -> Tensor:
            batch = Batch(
                tokens=torch.zeros(end - first, dtype=torch.int64),
                positions=torch.arange(first, end),
                slots=slots[first:end],
                block_table=torch.tensor([table], dtype=torch.int32),
                query_start=torch.tensor([0, end - first], dtype=torch.int32),
                kv_lens=torch.tensor([end], dtype=torch.int32),
                logit_rows=torch.tensor([end - first - 1]),
                query_lens_host=(end - first,),
                kv_lens_host=(end,),
            )
            rows = slice(first, end)
            return backend.run(q[rows], k[rows], v[rows], cache, backend.plan(batch, layer, size), None)

        got = torch.cat([call(0, 18), call(18, 19), call(19, 20)]).double()
        torch.testing.assert_close(got, attention_oracle(q, k, v, layer, None), atol=1e-5, rtol=1e-4)

    def test_slots_beyond_2_to_the_31_are_counted_in_64_bits(self) -> None:
        request = Request("a", [7] * 21)
        request.blocks = array("i", [0, block := 2**31 // 16 + 3])
        slots = flatten([Chunk(request, 20, 1, True)], 16).batch(torch.device("cpu")).slots
        assert slots.dtype == torch.int64 and slots.tolist() == [block * 16 + 4]


class TestFeatures:
    """What a model's attention has is used, by every backend that takes the model."""

    @backends
    @pytest.mark.parametrize(
        ("architecture", "options"),
        [
            ("gemma2", {"attn_logit_softcapping": 2.0}),
            ("gemma2", {"attn_logit_softcapping": 5.0}),
            ("cohere2", {}),
            ("gpt_oss", {}),
            ("deepseek_v3", {}),
            ("granite", {}),
        ],
    )
    def test_softcap_windows_sinks_scales_and_value_sizes_are_never_dropped(
        self, tiny: Tiny, attention: str, architecture: str, options: dict[str, float]
    ) -> None:
        model = tiny(architecture, **options)
        assert_equal_to_eager(model, attention, [words(n, seed=n, below=128) for n in (4, 7, 25)])

    @pytest.mark.parametrize(("architecture", "lacks"), [("gemma2", "logit softcap"), ("mistral", "sliding window")])
    def test_a_backend_that_lacks_what_the_model_needs_is_passed_over_or_refused_at_the_start(
        self, tiny: Tiny, architecture: str, lacks: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plugins.load()
        monkeypatch.setattr(native, "obstacle", lambda: None)
        rank = CpuAttention.capabilities.auto_rank
        monkeypatch.setattr(CpuAttention, "capabilities", Capabilities(devices=frozenset({"cpu"}), auto_rank=rank))
        path = tiny(architecture).info.path

        def build(*overrides: str) -> Any:
            with initialize_config_module("turnout.conf", version_base=None):
                return build_engine(resolve(compose("serve", [f"model='{path}'", "blocks.num_blocks=8", *overrides])))

        engine = build()
        assert engine.info.plugins["attention"]["name"] == "torch"
        assert "attention=auto chose torch: not cpu, since the model has" in str(engine.info.notes)
        with pytest.raises(
            ModelError, match=f"attention=cpu cannot serve .*the model has {lacks}.* would work: .*torch"
        ):
            build("attention=cpu")
        assert build("attention=torch").info.plugins["attention"]["name"] == "torch"

    @backends
    @pytest.mark.parametrize("form", ["fp8", "int8"])
    def test_an_8_bit_cache_gives_a_prompt_whole_in_chunks_and_a_decode_the_same_numbers(
        self, attention: str, form: str
    ) -> None:
        """Keys and values whose scales are far from 1 and from each other; or the form is refused by name."""
        can: Capabilities = BACKENDS[attention]().capabilities
        layer = LayerSpec(4, 2, 32, 0.2)
        if form not in can.cache_dtypes:
            refusals = can.refusals([layer], 4, torch.float32, torch.device("cpu"), form)
            assert any(f"kv_cache_dtype is {form}" in reason for reason in refusals)
            return
        for queries in (9, 4, 1):
            scene = Scene(BACKENDS[attention](), AttentionCase("", layer, ((queries, 9),), 4, cache_dtype=form))
            request = scene.requests[0]
            request.keys, request.values = request.keys * 0.25, request.values * 16  # powers of 2: the same codes
            compared(scene, scene.attend()).check()

    def test_an_8_bit_cache_is_asked_for_by_one_name(self) -> None:
        found = plugins.load()
        for override in ("attention.kv_cache_dtype=fp8", "blocks.dtype=fp8", "attention.cache_dtype=int8"):
            with pytest.raises(Usage, match=override.split("=")[0]):
                try_composing("serve", ["attention=torch", override], found)

    def test_scales_of_an_fp8_cache_in_a_checkpoint_are_refused_not_dropped(self, tmp_path: Path) -> None:
        folder = models.save("llama", tmp_path)
        tensors = load_file(folder / "model.safetensors")
        for side in ("k", "v"):
            tensors[f"model.layers.0.self_attn.{side}_scale"] = torch.tensor(0.25)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match="k_scale"):
            load(inspect(str(folder), dtype="float32", device="cpu"), Unquantized())
