"""The attention contract passes what is right and fails each planted fault, by the rule that forbids it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any
from unittest import SkipTest

import pytest
import torch
from loop_attention import LoopAttention, broken

from turnout.core import Capabilities, LayerSpec
from turnout.plugins.attention.torch_sdpa import TorchAttention
from turnout.testing import AttentionCase, AttentionContract, attention_cases, check_component
from turnout.testing.attention import Compared, attention_oracle, plain_attention
from turnout.testing.attention_contract import attention_rules
from turnout.testing.attention_scene import Scene
from turnout.testing.cache_forms import keep, restore, settled


class TestTheReference(AttentionContract):
    make = TorchAttention


RIGHT = "it errs at most twice as much as plain pytorch: "


def fault_of(rule: str, make: type) -> str | None:
    """What the one rule of this name says of a backend."""
    (check,) = [check for sentence, check in attention_rules(make) if sentence == rule]
    try:
        check()
    except Exception as error:  # noqa: BLE001  a fault may show as any error
        return f"{type(error).__name__}: {error}"
    return None


def test_a_backend_that_is_right_passes_every_rule() -> None:
    results = check_component("attention", LoopAttention)
    assert [c for c in results if c.fault or c.skipped] == []
    assert {c.rule for c in results} >= {rule for _, rule in PLANTED}


PLANTED = [
    ("a window off by one", RIGHT + "a window of 3"),
    ("a window off by one", RIGHT + "attention sinks in a window"),
    ("a causal mask anchored top left", RIGHT + "ragged prefills and decodes in one call"),
    ("a causal mask anchored top left", "a prompt in chunks of any size is the whole prompt"),
    ("a scale off by 1 %", RIGHT + "ragged prefills and decodes in one call"),
    ("a scale off by 1 %", RIGHT + "a scale of its own"),
    ("a scale off by 1 %", "its scale is the layers own"),
    ("two blocks swapped", RIGHT + "ragged prefills and decodes in one call"),
    ("the last part-full block dropped", RIGHT + "lengths at block boundaries"),
    ("offsets in 32 bits", "a cache of more than 2 to the 31 elements is addressed right"),
    ("NaN from a masked row", "rows that see no key are zero and the others right"),
    ("what others left read under the mask", RIGHT + "lengths at block boundaries"),
    ("heads interleaved among key heads", RIGHT + "5 heads a key head"),
    ("softcap before the scale", RIGHT + "logit softcap"),
    ("sinks ignored", RIGHT + "attention sinks"),
    ("scales of the token before", RIGHT + "ragged prefills and decodes in one call, float32, cache in int8"),
    ("keys written one slot on", RIGHT + "ragged prefills and decodes in one call"),
    ("keys written one slot on", "a block shared by two requests serves both"),
    ("padding written to block 0", "only the blocks of its slots are written"),
    ("another rounding for a request alone", "a request is answered alike alone and among others"),
    ("a plan that keeps its first lengths", "a plan brought up to date answers the next step"),
    ("scales for all blocks", "a cache has its blocks in the first dimension"),
    ("a cache for all layers", "a cache has its blocks in the first dimension"),
    ("codes in 16 bits", "a cache in 8 bits is smaller than one in the models dtype"),
]


@pytest.mark.parametrize(("fault", "rule"), PLANTED)
def test_a_planted_fault_breaks_the_rule_that_forbids_it(fault: str, rule: str) -> None:
    assert fault_of(rule, broken(fault)), f"nothing noticed: {fault}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("a scale off by 1 %", "its scale is the layers own"),
        ("a window off by one", RIGHT + "a window of 3"),
        ("two blocks swapped", RIGHT + "ragged prefills and decodes in one call"),
        ("scales of the token before", RIGHT + "ragged prefills and decodes in one call, {dtype}, cache in int8"),
    ],
)
def test_the_rounding_of_half_precision_hides_no_fault(fault: str, rule: str, dtype: torch.dtype) -> None:
    can = replace(LoopAttention.capabilities, dtypes=frozenset({dtype}))
    rule = rule.format(dtype=str(dtype).removeprefix("torch."))
    assert fault_of(rule, broken("", capabilities=can)) is None
    assert fault_of(rule, broken(fault, capabilities=can))


class Careless(Capabilities):
    """Refuses nothing but a device."""

    def refusals(self, *asked: Any, **more: Any) -> list[str]:
        return []


class Timid(Capabilities):
    """Refuses everything."""

    def refusals(self, *asked: Any, **more: Any) -> list[str]:
        return ["I would rather not"]


def test_what_is_not_claimed_must_be_refused() -> None:
    rule = "it refuses what it does not claim"
    for changed in ({"softcap": False}, {"window": False}, {"sinks": False}, {"v_head_dim": False}):
        less = {**LOOP, **changed}
        assert fault_of(rule, broken("", capabilities=Capabilities(**less))) is None
        (name,) = changed
        assert name in str(fault_of(rule, broken("", capabilities=Careless(**less))))
    for name, value, what in (
        ("dtypes", {torch.float32}, "a model in bfloat16"),
        ("head_dims", {64}, "heads of 32"),
        ("block_sizes", {16}, "blocks of 8"),
        ("cache_dtypes", set(), "a cache in fp8"),
        ("devices", {"cpu"}, "the device cuda"),
    ):
        anything: dict[str, Any] = {"window": True, "softcap": True, "sinks": True, "v_head_dim": True, "graphs": True}
        careless = Careless(**anything, cache_dtypes=frozenset({"fp8", "int8", "int4"}))
        assert what in str(fault_of(rule, broken("", capabilities=replace(careless, **{name: frozenset(value)}))))


def test_a_backend_that_refuses_everything_serves_nothing() -> None:
    fault = fault_of("it serves a plain model", broken("", capabilities=Timid(**LOOP)))
    assert "refuses even a model without any feature" in str(fault)


def test_combinations_that_are_refused_are_not_tried() -> None:
    class Either(Capabilities):
        def refusals(self, layers: Any, *asked: Any, **more: Any) -> list[str]:
            both = any(layer.window and layer.sinks for layer in layers)
            return super().refusals(layers, *asked, **more) + ["windows exclude sinks"] * both

    names = {case.name for case in attention_cases(Either(window=True, sinks=True))}
    assert {"attention sinks", "a window of 3"} <= names and "attention sinks in a window" not in names


LOOP = {spec.name: getattr(LoopAttention.capabilities, spec.name) for spec in fields(Capabilities)}


class OnlyOnAGPU(LoopAttention):
    capabilities = replace(LoopAttention.capabilities, devices=frozenset({"cuda"}))


class WithoutItsLibrary(LoopAttention):
    capabilities = replace(LoopAttention.capabilities, needs=("no_such_library",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("make", "why"), [(OnlyOnAGPU, "needs a GPU"), (WithoutItsLibrary, "no_such_library not installed")]
)
def test_a_backend_that_cannot_run_here_fails_the_check_with_the_reason_and_skips_the_suite(
    make: type, why: str
) -> None:
    (result,) = [c for c in check_component("attention", make) if c.fault]
    assert result.rule == "it can run here" and why in str(result.fault)
    suite = type("Suite", (AttentionContract,), {"make": make})()
    with pytest.raises(SkipTest, match=why):
        suite.setup_method()


class TestTheYardsticks:
    """What the kit measures by is right itself."""

    @pytest.mark.parametrize(
        "features", [{}, {"window": 3}, {"softcap": 2.0}, {"sinks": True}, {"v_head_dim": 8}], ids=str
    )
    def test_plain_pytorch_in_float64_is_the_oracle(self, features: dict[str, Any]) -> None:
        layer = LayerSpec(6, 2, 16, 0.3, **features)
        for num_q, num_k in ((1, 1), (1, 9), (5, 9), (9, 9), (4, 2)):
            scene = Scene(LoopAttention(), AttentionCase("", layer, ((num_q, num_q), (1, num_k)), dtype=torch.float64))
            q, k, v = scene.requests[0].queries, scene.requests[1].keys, scene.requests[1].values
            plain, truth = (f(q, k, v, layer, scene.sinks) for f in (plain_attention, attention_oracle))
            torch.testing.assert_close(plain, truth, atol=1e-14, rtol=1e-13)

    def test_the_oracle_is_the_formula(self) -> None:
        q, k, v = torch.tensor([[[2.0]]]), torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[[10.0]], [[20.0]]])
        a, b = math.exp(0.5 * 2 * 1), math.exp(0.5 * 2 * 3)
        found = attention_oracle(q, k, v, LayerSpec(1, 1, 1, 0.5), None)
        assert found.item() == pytest.approx((10 * a + 20 * b) / (a + b))
        sinks = torch.tensor([1.5])
        found = attention_oracle(q, k, v, LayerSpec(1, 1, 1, 0.5, sinks=True), sinks)
        assert found.item() == pytest.approx((10 * a + 20 * b) / (a + b + math.exp(1.5)))

    def test_nan_is_an_error_without_bound_and_another_shape_or_dtype_is_refused(self) -> None:
        want = torch.ones(2, 3, 4, dtype=torch.float64)
        plain = want.float()
        for got, why in (
            (torch.full((2, 3, 4), math.nan), "off by inf"),
            (plain[:1], r"is \(1, 3, 4\)"),
            (plain.bfloat16(), "of torch.bfloat16"),
            (plain + 1e-4 * (torch.arange(2) == 1)[:, None, None], "most at row 1, head 0"),
        ):
            with pytest.raises(AssertionError, match=why):
                Compared(got, want, plain).check()
        Compared(plain, want, plain).check()

    @pytest.mark.parametrize("form", ["int8", "fp8"])
    def test_8_bits_keep_what_they_can(self, form: str) -> None:
        x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1))
        x[3] = 0
        found = restore(keep(x, form))
        step = {"int8": 0.5 / 127, "fp8": 1 / 16}[form]  # half a code of the largest; half of a last bit
        bound = x.abs().amax(-1, keepdim=True) * step if form == "int8" else x.abs() * step + 1e-3
        assert ((found - x).abs() <= bound * 1.001).all() and not found[3].any()
        assert torch.equal(keep(x, form).codes[3].float(), torch.zeros(3, 64))
        largest = {"int8": 127, "fp8": 448}[form]
        assert keep(x[:3], form).codes.float().abs().amax(-1).eq(largest).all()

    @pytest.mark.parametrize("form", ["int8", "fp8"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_settled_numbers_have_the_same_codes_however_they_are_scaled(self, form: str, dtype: torch.dtype) -> None:
        x = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
        x[0, 0, :3] = torch.tensor([127.0, 63.5, 0.5])  # in the middle between two codes of int8
        x = settled(x, form)
        codes = keep(x, form).codes.float()
        for factor in (1 - 2e-4, 1 + 2e-4):
            assert torch.equal(keep(x.float() * factor, form).codes.float(), codes)
            scales = keep(x, form).scales[..., None] * factor
            again = (
                (x.float() / scales).round()
                if form == "int8"
                else (x.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            )
            assert torch.equal(again.float(), codes)
        assert torch.equal(settled(x, form), x)
