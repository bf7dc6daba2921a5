"""What attention costs on a CPU: decode beside the memory's speed and beside gathering, prompts beside torch's own kernel, the
8-bit cache beside the full one. Run with `make bench`; times are shown, never asserted.

Caches are many layers' worth, more than the processor keeps, as in a step of a real model.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.core import Batch, KVSpec, LayerSpec
from turnout.kernels import cpu as native
from turnout.kernels.cpu import build
from turnout.plugins.attention.cpu import CpuAttention

pytestmark = [pytest.mark.slow, pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")]

SIZE = 16  # tokens of a block
ALL_LAYERS = 300e6  # bytes of cache a round goes through, at least
SMOLLM2, EIGHT_B = LayerSpec(9, 3, 64, 0.125), LayerSpec(32, 8, 128, 128**-0.5)
shapes = pytest.mark.parametrize("layer", [SMOLLM2, EIGHT_B], ids=["9/3/64", "32/8/128"])
contexts = pytest.mark.parametrize(("requests", "keys"), [(16, 1024), (4, 8192)], ids=["16x1k", "4x8k"])
READ = """
#include <cstdint>
typedef float vec __attribute__((vector_size(64), aligned(4)));
extern "C" void read_all(const float* p, int64_t n, int threads, float* out) {
    float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
    for (int64_t first = 0; first < n / 4096; first++) {
        const vec* at = reinterpret_cast<const vec*>(p + first * 4096);
        vec a = {}, b = {}, c = {}, d = {};
        for (int i = 0; i < 256; i += 4) a += at[i], b += at[i + 1], c += at[i + 2], d += at[i + 3];
        a += b + c + d;
        total += a[0] + a[5];
    }
    *out = total;
}
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tensor], None]:
    """Reads a tensor with all threads, as fast as plain code does."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "read.cpp").write_text(READ)
    command = [
        str(build.compiler()),
        *native.FLAGS,
        "-march=native",
        "-o",
        str(folder / "read.so"),
        str(folder / "read.cpp"),
    ]
    subprocess.run(command, check=True)
    run, out = ctypes.CDLL(str(folder / "read.so")).read_all, ctypes.c_float()
    run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    return lambda x: run(x.data_ptr(), x.nbytes // 4, torch.get_num_threads(), ctypes.addressof(out))


def batch(requests: int, queries: int, keys: int) -> Batch:
    """So many equal requests over shuffled blocks."""
    width = -(-keys // SIZE)
    table = torch.randperm(requests * width, generator=torch.Generator().manual_seed(0)).view(requests, width)
    at = torch.arange(keys - queries, keys)
    return Batch(
        tokens=torch.zeros(requests * queries, dtype=torch.int64),
        positions=at.repeat(requests),
        slots=(table[:, at // SIZE] * SIZE + at % SIZE).flatten(),
        block_table=table.int(),
        query_start=torch.arange(requests + 1, dtype=torch.int32) * queries,
        kv_lens=torch.full((requests,), keys, dtype=torch.int32),
        logit_rows=torch.arange(1, requests + 1) * queries - 1,
        query_lens_host=(queries,) * requests,
        kv_lens_host=(keys,) * requests,
    )


def made(num: int, layer: LayerSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q, k, v = (torch.randn(num, h, layer.head_dim, generator=generator).to(dtype) for h in heads)
    return q, k, v


def caches(layer: LayerSpec, requests: int, keys: int, dtype: torch.dtype, form: str) -> tuple[CpuAttention, list[Any]]:
    """A backend and its caches, filled by one prompt a request."""
    backend = CpuAttention()
    one = 2 * requests * keys * layer.num_kv_heads * layer.head_dim * dtype.itemsize
    spec = KVSpec((layer,) * (1 + int(ALL_LAYERS / one)), SIZE, requests * keys // SIZE, form)
    found = backend.allocate(spec, dtype, torch.device("cpu"))
    q, k, v = made(requests * keys, layer, dtype)
    stored = batch(requests, keys, keys)
    first = found[0]
    storing = replace(layer, window=1)  # it sees one key: filling the cache is what is wanted
    backend.run(q, k, v, first, backend.plan(stored, storing, SIZE), None)
    for other in found[1:]:
        for to, from_ in zip(other, first, strict=True):
            to.copy_(from_)
    return backend, found


DTYPES = [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.float32, "int8"), (torch.float32, "fp8")]


@pytest.mark.benchmark(min_rounds=3, max_time=0.5, warmup=False)
@shapes
@contexts
@pytest.mark.parametrize(("dtype", "form"), DTYPES, ids=["float32", "bfloat16", "int8", "fp8"])
def test_decode(benchmark: Any, layer: LayerSpec, requests: int, keys: int, dtype: torch.dtype, form: str) -> None:
    backend, found = caches(layer, requests, keys, dtype, form)
    q, k, v = made(requests, layer, dtype)
    plan = backend.plan(batch(requests, 1, keys), layer, SIZE)
    benchmark.group = f"decode {layer.num_heads}/{layer.num_kv_heads}/{layer.head_dim}, {requests}x{keys}"
    benchmark.extra_info["MiB"] = sum(t.nbytes for cache in found for t in cache) / 2**20
    benchmark(lambda: [backend.run(q, k, v, cache, plan, None) for cache in found])


@pytest.mark.benchmark(min_rounds=3, max_time=0.5, warmup=False)
@shapes
@contexts
def test_reading_the_cache_of_float32(
    benchmark: Any, layer: LayerSpec, requests: int, keys: int, reader: Callable[[Tensor], None]
) -> None:
    _, found = caches(layer, requests, keys, torch.float32, "auto")
    benchmark.group = f"decode {layer.num_heads}/{layer.num_kv_heads}/{layer.head_dim}, {requests}x{keys}"
    benchmark.extra_info["MiB"] = sum(t.nbytes for cache in found for t in cache) / 2**20
    benchmark(lambda: [reader(side) for cache in found for side in cache])


@pytest.mark.benchmark(min_rounds=3, max_time=0.5, warmup=False)
@shapes
@contexts
def test_a_loop_of_torchs_kernel_over_gathered_blocks(
    benchmark: Any, layer: LayerSpec, requests: int, keys: int
) -> None:
    one = 2 * requests * keys * layer.num_kv_heads * layer.head_dim * 4
    shape = (requests * keys // SIZE, SIZE, layer.num_kv_heads, layer.head_dim)
    found = [(torch.randn(shape), torch.randn(shape)) for _ in range(1 + int(ALL_LAYERS / one))]
    table = batch(requests, 1, keys).block_table.long()
    q = made(requests, layer, torch.float32)[0].view(requests, layer.num_kv_heads, -1, layer.head_dim)

    def step() -> None:
        for cache in found:
            for b in range(requests):
                k, v = (side[table[b]].flatten(0, 1).transpose(0, 1)[None] for side in cache)
                F.scaled_dot_product_attention(q[b : b + 1], k, v, scale=layer.scale)

    benchmark.group = f"decode {layer.num_heads}/{layer.num_kv_heads}/{layer.head_dim}, {requests}x{keys}"
    benchmark.extra_info["MiB"] = one * len(found) / 2**20
    benchmark(step)


@pytest.mark.benchmark(min_rounds=3, max_time=1.0, warmup=False)
@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_a_prompt_of_2048(benchmark: Any, layer: LayerSpec, dtype: torch.dtype, whose: str) -> None:
    """Torch's kernel gets contiguous tensors, ours a paged cache it has to fill."""
    num = 2048
    q, k, v = made(num, layer, dtype)
    benchmark.group = f"prompt of {num}, {layer.num_heads}/{layer.num_kv_heads}/{layer.head_dim}, {str(dtype)[6:]}"
    if whose == "ours":
        backend = CpuAttention()
        (cache,) = backend.allocate(KVSpec((layer,), SIZE, num // SIZE), dtype, torch.device("cpu"))
        plan = backend.plan(batch(1, num, num), layer, SIZE)
        benchmark(lambda: backend.run(q, k, v, cache, plan, None))
    else:
        dense = [side.transpose(0, 1)[None].contiguous() for side in (q, k, v)]
        benchmark(lambda: F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True))


@pytest.mark.benchmark(min_rounds=1, max_time=0.1, warmup=False, group="error of an 8-bit cache")
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_the_error_of_an_8_bit_cache(benchmark: Any, form: str) -> None:
    """Relative to the answers in float32, over 4 requests of 1,024 keys of normal numbers; in the column of extra info."""
    got = []
    for kept in ("auto", form):
        backend, found = caches(SMOLLM2, 4, 1024, torch.float32, kept)
        q, k, v = made(4, SMOLLM2, torch.float32)
        plan = backend.plan(batch(4, 1, 1024), SMOLLM2, SIZE)
        got.append(backend.run(q, k, v, found[0], plan, None))
    benchmark.extra_info["relative error"] = ((got[1] - got[0]).norm() / got[0].norm()).item()
    benchmark(lambda: backend.run(q, k, v, found[0], plan, None))
