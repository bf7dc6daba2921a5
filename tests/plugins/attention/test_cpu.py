"""attention=cpu: the contract of every backend in each dtype and form of the cache, and what is its own: answers that
depend on nothing but the token, kernels for each width of vectors."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from turnout.core import KVSpec, LayerSpec
from turnout.kernels import cpu as native
from turnout.kernels.cpu import build
from turnout.plugins.attention.cpu import CpuAttention
from turnout.testing import AttentionCase, AttentionContract
from turnout.testing.attention import check_attention
from turnout.testing.attention_scene import Part, Scene

pytestmark = pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}")

FORMS = [
    (torch.float32, "auto"),
    (torch.bfloat16, "auto"),
    (torch.float16, "auto"),
    (torch.float32, "int8"),
    (torch.bfloat16, "int8"),
    (torch.float32, "fp8"),
    (torch.float16, "fp8"),
]


class TestContract(AttentionContract):
    make = CpuAttention


def check(layer: LayerSpec, dtype: torch.dtype, form: str, *lens: tuple[int, int], block_size: int = 16) -> None:
    check_attention(CpuAttention(), AttentionCase(f"{layer}", layer, lens, block_size, dtype, "cpu", form))


def check_forms(number: int, layer: LayerSpec, *lens: tuple[int, int], block_size: int = 16) -> None:
    """In float32, and in one other dtype or form of the cache: another one for each number of a row of cases."""
    for dtype, form in (FORMS[0], FORMS[1 + number % (len(FORMS) - 1)]):
        check(layer, dtype, form, *lens, block_size=block_size)


def test_any_head_size() -> None:
    for number, dim in enumerate((6, 32, 40, 80, 96, 100, 112, 128, 192, 256)):
        check_forms(number, LayerSpec(4, 2, dim, dim**-0.5), (1, 33), (9, 20))


def test_any_block_size() -> None:
    for number, block_size in enumerate((4, 8, 12, 24, 32, 64, 128)):
        check_forms(number, LayerSpec(6, 2, 64, 0.125), (1, 150), (20, 140), (1, 5), block_size=block_size)


def test_any_number_of_heads_a_key_head() -> None:
    for number, ratio in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 71)):
        check_forms(number, LayerSpec(ratio, 1, 32, 0.2), (1, 40), (7, 23), (1, 1))


@pytest.mark.parametrize("features", [{"window": 40}, {"softcap": 3.0}, {"sinks": True}, {"v_head_dim": 24}], ids=str)
def test_features_over_several_tiles(features: dict[str, float]) -> None:
    for dtype, form in FORMS:
        check(LayerSpec(3, 1, 64, 0.2, **features), dtype, form, (1, 200), (70, 130), (3, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_long_ranges_are_split_over_threads_and_merged_right(threads: int) -> None:
    torch.set_num_threads(threads)
    for window in (None, 700):
        for lens in (((1, 1500),), ((1, 1024), (1, 3)), ((40, 1100),), ((1, 1025), (70, 70))):
            check(LayerSpec(3, 1, 32, 0.2, window=window), torch.float32, "auto", *lens)


def answers(lens: tuple[tuple[int, int], ...], form: str, chunk: int | None, threads: int) -> Tensor:
    """The answers to every request's queries, asked `chunk` at a time."""
    torch.set_num_threads(threads)
    case = AttentionCase("one", LayerSpec(6, 2, 64, 0.125, window=None), lens, cache_dtype=form)
    scene = Scene(CpuAttention(), case)
    scene.store_earlier()
    if chunk is None:
        return scene.call(scene.last)
    found = []
    for request, first, end in scene.last:
        pieces = [Part(request, at, min(at + chunk, end)) for at in range(first, end, chunk)]
        found += [scene.call([piece]) for piece in pieces]
    return torch.cat(found)


@pytest.mark.parametrize("form", ["auto", "int8", "fp8"])
def test_an_answer_depends_on_neither_neighbours_nor_chunks_nor_threads(form: str) -> None:
    """Bit for bit: decode steps, chunks and whole prompts sum in one order, split over threads or not."""
    lens = ((1, 1100), (1, 5), (70, 600), (33, 33))
    whole = answers(lens, form, None, 2)
    for chunk in (None, 1, 7, 64):
        for threads in (1, 2, 5):
            assert torch.equal(answers(lens, form, chunk, threads), whole), (chunk, threads)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_an_8_bit_cache_takes_a_quarter_and_a_scale_a_token_and_head(form: str) -> None:
    layer = LayerSpec(9, 3, 64, 0.125)

    def taken(cache_dtype: str) -> int:
        (cache,) = CpuAttention().allocate(KVSpec((layer,), 16, 8, cache_dtype), torch.float32, torch.device("cpu"))
        return sum(t.nbytes for t in cache)

    assert taken(form) == taken("auto") // 4 + 8 * 16 * 3 * 2 * 4


def test_a_token_that_is_nan_in_an_8_bit_cache_stays_nan_and_zeros_stay_zero() -> None:
    case = AttentionCase("one", LayerSpec(2, 1, 32, 0.2), ((1, 20), (1, 20)), cache_dtype="int8")
    scene = Scene(CpuAttention(), case)
    bad, good = scene.requests
    bad.values[3, 0, 5] = float("nan")
    good.keys[:], good.values[:] = 0.0, 0.0
    out = scene.attend()
    assert out[0].isnan().any() and torch.equal(out[1], torch.zeros(2, 32))


def compiled(march: str, folder: Path) -> ctypes.CDLL:
    """The attention kernels alone, for another kind of machine; optimised less, so that it takes seconds."""
    made, tool = folder / f"{march}.so", build.compiler()
    assert tool is not None
    flags = [flag.replace("-O3", "-O1") for flag in native.FLAGS]
    source = str(build.FOLDER / "attention.cpp")
    subprocess.run([tool, *flags, "-Wno-psabi", f"-march={march}", "-o", str(made), source], check=True)
    return ctypes.CDLL(str(made))


@pytest.mark.slow
@pytest.mark.parametrize("march", ["x86-64-v3", "x86-64-v4", "x86-64"])
def test_kernels_for_every_width_of_vectors_are_right(
    march: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if build.compiler() is None:
        pytest.skip("there is no C++ compiler")
    if not build.LEVELS.get(march, frozenset({"sse2"})) <= build.features():
        pytest.skip(f"this machine does not run {march}")
    library = compiled(march, tmp_path)
    monkeypatch.setattr(native, "library", lambda: library)
    for dtype, form in FORMS:
        check(LayerSpec(6, 2, 40, 0.2), dtype, form, (1, 70), (20, 90), (1, 3), block_size=8)
        check(LayerSpec(3, 1, 64, 0.2, window=50, sinks=True), dtype, form, (1, 600), (9, 70), (1, 1))
        check(LayerSpec(16, 1, 32, 0.2, softcap=2.0), dtype, form, (1, 70), (5, 5), block_size=32)
