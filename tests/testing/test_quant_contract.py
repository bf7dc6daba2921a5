"""The quantizer contract passes what is right and fails each planted fault, by the rule that forbids it."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import pytest
import torch
from nibbles import Nibbles, broken

from turnout.testing import QuantizerContract, check_component
from turnout.testing.quant import quant_rules
from turnout.testing.quant_model import distance
from turnout.testing.quant_suite import error_of, noise


class TestNibbles(QuantizerContract):
    make = Nibbles
    bits = 4


def fault_of(rule: str, make: Any) -> str | None:
    """What the one rule of this name says of a quantizer."""
    try:
        dict(quant_rules(make))[rule]()
    except SkipTest as reason:
        pytest.fail(f"skipped: {reason}")
    except Exception as error:  # noqa: BLE001  a fault may show as any error
        return f"{type(error).__name__}: {error}"
    return None


CLOSE = "its layer is close to the float one"
MODEL = "a tiny model says nearly the same"
PLANTED = [
    ("scale off", "it neither grows nor shrinks what goes through"),
    ("zero point shifted", CLOSE),
    ("zero point shifted", MODEL),
    ("nibbles swapped", CLOSE),
    ("nibbles swapped", MODEL),
    ("groups off by one", "large and small weights side by side keep scales of their own"),
    ("groups off by one", MODEL),
    ("bias dropped", "a bias is added"),
    ("forward differs", "what it dequantizes to is what it multiplies by"),
    ("one scale for the batch", "a row does not depend on its neighbours"),
    ("one scale for all joined", "joined siblings are the separate ones side by side"),
    ("joined in another order", "joined siblings are the separate ones side by side"),
    ("NaN swallowed", "nan stays in its row and zeros are zeros"),
    ("writes to its input", "what it is given stays as it is"),
    ("writes to the checkpoint", "what it is given stays as it is"),
    ("float32 out", "the output has the inputs dtype and leading dimensions"),
    ("floats kept", "its layers take about the memory their bits say"),
    ("refuses without a name", CLOSE),
]


@pytest.mark.parametrize(("fault", "rule"), PLANTED)
def test_a_planted_fault_breaks_the_rule_that_forbids_it(fault: str, rule: str) -> None:
    assert fault_of(rule, broken(fault)), f"nothing noticed: {fault}"


def test_the_suite_is_run_by_plugins_check() -> None:
    results = check_component("quant", Nibbles)
    assert [c for c in results if c.fault] == []
    assert {c.rule for c in results} >= {rule for _, rule in PLANTED}
    assert [c.skipped for c in results if c.skipped] == ["it names no checkpoint"]


def test_without_stated_bits_a_quantizer_is_held_to_what_its_layers_take() -> None:
    def held(make: Any, bits: float | None = None) -> float:
        return type("Suite", (QuantizerContract,), {"make": make, "bits": bits})().held_to

    assert held(Nibbles) == pytest.approx(0.8 * (4 + 2 * 32 / 32), abs=0.01)  # two float32 for 32 weights
    assert held(broken("floats kept")) > 16 and held(Nibbles, 3) == 3


def test_distances_between_distributions() -> None:
    truth = noise(50, 30, seed=1).double() * 3
    assert distance(truth, truth) == (0.0, 0.0, 1.0)
    assert distance(truth, truth + 5).share == pytest.approx(0.0, abs=1e-12)
    assert distance(truth, truth.roll(1, 0)).share == pytest.approx(1.0)
    flat = distance(truth, torch.zeros_like(truth))
    assert 0.1 < flat.share < 1 and flat.perplexity > 2
    assert distance(truth, truth * torch.nan) == (float("inf"), 1.0, float("inf"))
    assert error_of(torch.tensor([3.0, float("nan")]), torch.ones(2)) == float("inf")
