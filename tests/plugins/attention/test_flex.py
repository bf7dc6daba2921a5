"""attention=flex: unfused it must keep the contract on any device; compiled for this CPU it gives the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from turnout.core import LayerSpec
from turnout.plugins.attention.flex import FlexAttention
from turnout.testing import AttentionContract
from turnout.testing.attention import check_attention
from turnout.testing.attention_cases import selected_cases
from turnout.testing.attention_scene import AttentionCase, Lens

KINDS = {  # one case for each way the code goes; every kind of heads is traced anew, which takes a second
    "ragged prefills and decodes in one call",
    "lengths at block boundaries",
    "head size 80",
    "block size 12",
    "a window of 3",
    "logit softcap",
    "attention sinks in a window",
    "values of another head size",
    "ragged prefills and decodes in one call, bfloat16",
}


class TestFlex(AttentionContract):
    make = partial(FlexAttention, compile=False)
    device = "cpu"

    def cases(self) -> list[AttentionCase]:
        return [case for case in super().cases() if case.name in KINDS]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch, in its own compiler
@pytest.mark.skipif(FlexAttention.obstacle() is not None, reason=f"{FlexAttention.obstacle()}")
@pytest.mark.parametrize("case", list(selected_cases(FlexAttention.capabilities)), ids=lambda case: case.name)
def test_compiled_for_this_cpu_it_errs_no_more(case: AttentionCase) -> None:
    check_attention(FlexAttention(), case)


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def test_steps_of_other_sizes_compile_nothing_new() -> None:
    """Numbers of requests, queries, keys and blocks stay open, within buckets that double."""
    torch._dynamo.reset()
    backend = FlexAttention(compile=False)
    layer = LayerSpec(4, 1, 32, 0.2, window=9, softcap=3.0, sinks=True)

    def step(*lens: tuple[int, int]) -> None:
        check_attention(backend, AttentionCase("", layer, lens, 8))

    step((1, 300), (1, 7), (1, 9), (5, 5), (7, 300))
    step((1, 9), (3, 9))
    before = graphs()
    sizes: list[Lens] = [((1, 400), (5, 290)), ((1, 1), (1, 2), (1, 3), (40, 40), (2, 80)), ((1, 30),), ((130, 131),)]
    for lens in sizes:
        step(*lens)
    assert before and graphs() == before


def test_kernels_say_whether_they_are_compiled() -> None:
    assert FlexAttention().kernels() == f"FlexAttention of torch {torch.__version__}, compiled"
    assert FlexAttention(compile=False).kernels().endswith("unfused")


def test_without_a_gpu_and_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("turnout.kernels.cpu.compiler", lambda: None)
    assert "install a C++ compiler" in (FlexAttention.obstacle() or "")


del AttentionContract
