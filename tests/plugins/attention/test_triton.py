"""attention=triton in Triton's interpreter, on the CPU: the contract of every backend, and what is its own.

With a GPU the interpreter is off (`tests/conftest.py`) and these skip: `tests/gpu/` tries the compiled kernels there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from interpreting import NO_INTERPRETER

from turnout.core import Batch, Capabilities, KVSpec, LayerSpec
from turnout.plugins.attention.triton import TritonAttention
from turnout.plugins.attention.triton.shapes import MOST_PARTS, decode_launch, parts, prompt_launch
from turnout.testing import AttentionCase, AttentionContract
from turnout.testing.attention import check_attention
from turnout.testing.attention_cases import attention_cases, selected_cases

pytestmark = pytest.mark.skipif(NO_INTERPRETER is not None, reason=f"{NO_INTERPRETER}")


@dataclass
class Interpreted(TritonAttention):
    """Declared for the device the interpreter has."""

    capabilities: ClassVar[Capabilities] = replace(
        TritonAttention.capabilities, devices=frozenset({"cpu"}), head_dims=frozenset({32, 64, 80, 96, 128})
    )


@pytest.mark.slow
class TestTriton(AttentionContract):
    make = Interpreted

    def selected(self) -> list[AttentionCase]:
        plain, *_, featured = selected_cases(self.capabilities)  # the last has every feature, and an 8-bit cache
        return [plain, replace(featured, dtype=torch.bfloat16)]


SPLIT = (
    "in one call",
    "boundaries",
    "for all",
    "of 17",
    "softcap",
    "sinks",
    "sinks, bfloat16",
    "call, float16, cache in int8",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in attention_cases(Interpreted.capabilities) if c.name.endswith(SPLIT)], ids=lambda case: case.name
)
def test_keys_split_among_programs_give_the_same(case: AttentionCase) -> None:
    """A decode's keys in 3 parts, some of them empty where they are few; prompts in small tiles."""
    check_attention(Interpreted(num_splits=3, decode_block_n=16, block_m=16, block_n=16), case)


LAYER = LayerSpec(4, 2, 32, 0.2)


def batch_of_one(keys: int = 40, queries: int = 1) -> Batch:
    def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    slots = torch.arange(keys - queries, keys)
    return Batch(
        torch.zeros(queries, dtype=torch.int64), slots, slots, ints(0, 1, 2)[None], ints(0, queries), ints(keys),
        ints(queries - 1, dtype=torch.int64), (queries,), (keys,),
    )  # fmt: skip


def test_a_group_larger_than_a_tile_widens_the_tile() -> None:
    layer = LayerSpec(71, 1, 64, 0.125)
    check_attention(Interpreted(block_m=32), AttentionCase("a large group", layer, ((1, 40), (3, 20))))


def test_queries_keys_and_values_may_be_slices_of_one_tensor() -> None:
    """As a fused projection leaves them: rows further apart than they are long."""
    backend = Interpreted()
    (cache,) = backend.allocate(KVSpec((LAYER,), 16, 3), torch.float32, torch.device("cpu"))
    fused = torch.randn(5, 8, 32)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    plan = backend.plan(batch_of_one(5, 5), LAYER, 16)
    got = backend.run(q, k, v, cache, plan, None)
    torch.testing.assert_close(got, backend.run(q.clone(), k.clone(), v.clone(), cache, plan, None), rtol=0, atol=0)


def test_a_token_without_a_slot_is_stored_nowhere() -> None:
    backend = Interpreted()
    (cache,) = backend.allocate(KVSpec((LAYER,), 16, 3), torch.float32, torch.device("cpu"))
    batch = replace(batch_of_one(2, 2), slots=torch.tensor([-1, 1]))
    backend.run(
        torch.ones(2, 4, 32), torch.ones(2, 2, 32), torch.ones(2, 2, 32), cache, backend.plan(batch, LAYER, 16), None
    )
    assert [cache[0].flatten(0, 1)[slot].any().item() for slot in (0, 1, 2)] == [False, True, False]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
def test_nan_in_a_key_spoils_its_token_in_an_8_bit_cache_and_no_other() -> None:
    for form in ("int8", "fp8"):
        backend = Interpreted()
        (cache,) = backend.allocate(KVSpec((LAYER,), 16, 3, form), torch.float32, torch.device("cpu"))
        k = torch.ones(3, 2, 32)
        k[1, 0, 5] = float("nan")
        k[2, 1, 5] = float("inf")
        q = torch.ones(3, 4, 32)
        backend.run(q, k, torch.ones(3, 2, 32), cache, backend.plan(batch_of_one(3, 3), LAYER, 16), None)
        assert cache[2].flatten(0, 1)[:3].isnan().tolist() == [[False, False], [True, False], [False, True]]


def test_a_plan_of_prompts_cannot_be_refreshed() -> None:
    backend = Interpreted()
    backend.allocate(KVSpec((LAYER,), 16, 3), torch.float32, torch.device("cpu"))
    batch = batch_of_one(5, 5)
    with pytest.raises(ValueError, match="decodes only"):
        backend.refresh(backend.plan(batch, LAYER, 16), batch, LAYER, 16)


def test_the_parts_of_a_decode_depend_on_shapes_alone() -> None:
    backend = Interpreted(decode_block_n=16)
    backend.allocate(KVSpec((LAYER,), 16, 3), torch.float32, torch.device("cpu"))
    plans = [backend.plan(replace(batch_of_one(), kv_lens_host=(keys,)), LAYER, 16) for keys in (1, 48)]
    assert plans[0].tiles[0].splits == plans[1].tiles[0].splits
    assert plans[0].tiles[0].launch == plans[1].tiles[0].launch


@pytest.mark.parametrize(
    ("tiles", "most_keys", "expected"),
    [(1, 32768, 64), (8, 32768, 9), (64, 32768, 2), (256, 32768, 1), (1, 256, 2), (1, 64, 1)],
)
def test_few_decodes_are_split_until_the_gpu_is_full(tiles: int, most_keys: int, expected: int) -> None:
    assert parts(tiles, 8, most_keys, 64, processors=132) == expected <= MOST_PARTS


def test_a_tile_holds_a_whole_group_and_is_a_power_of_two() -> None:
    for pad, itemsize, group in itertools.product((16, 32, 64, 128, 256), (2, 4), (1, 3, 8, 16, 71, 128)):
        for launch in (prompt_launch(pad, itemsize, group), decode_launch(pad, itemsize, group)):
            assert launch.block_m >= max(group, 16)
            assert launch.block_m & (launch.block_m - 1) == launch.block_n & (launch.block_n - 1) == 0


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [("block_m", 24, "power of two"), ("decode_block_n", 8, "at least 16"), ("num_warps", 3, "1, 2, 4, 8 or 16"),
     ("num_stages", 0, "at least 1"), ("num_splits", 0, "at least 1")],
)  # fmt: skip
def test_an_impossible_launch_is_refused_by_name(option: str, value: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"attention\.{option} must be .*{rule}.*, got {value}"):
        TritonAttention(**{option: value})


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnout.plugins.attention.triton.interpreted", lambda kernel: False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        TritonAttention().allocate(KVSpec((LAYER,), 16, 3), torch.float32, torch.device("cpu"))
