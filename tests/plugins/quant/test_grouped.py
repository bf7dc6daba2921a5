"""Weights of small integers in groups: what they stand for, and what every way to compute with them must give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import close, product
from torch import Tensor

from turnout.plugins.quant import grouped
from turnout.plugins.quant.grouped import STORED, Grouped, narrowed, pack, unpack


def random_layer(
    bits: int = 4,
    outputs: int = 24,
    inputs: int = 96,
    group: int = 32,
    *,
    bias: bool = False,
    order: bool = False,
    seed: int = 0,
) -> tuple[Grouped, Tensor]:
    """A layer, and its weights by the definition."""
    source = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=source)
    scales = torch.rand(outputs, inputs // group, generator=source).half()
    zeros = torch.randint(0, 1 << bits, scales.shape, generator=source)
    places = torch.randperm(inputs, generator=source) if order else None
    layer = Grouped(
        pack(codes, bits),
        scales,
        -(scales.float() * zeros),
        bits,
        group,
        torch.randn(outputs, generator=source) if bias else None,
        places,
    )
    weights = product(codes, scales, zeros, [i // group for i in range(inputs)])
    if places is not None:
        weights = torch.empty_like(weights).index_copy_(1, places, weights)
    return layer, weights


@pytest.mark.parametrize("bits", sorted(STORED))
def test_packing_and_unpacking_gives_the_codes_back(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 7, 24), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (5, 7, 24 * STORED[bits] // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits), codes)


def test_the_first_code_lies_in_the_lowest_bits() -> None:
    assert pack(torch.tensor([[1, 2, 15, 0]]), 4).tolist() == [[0x21, 0x0F]]
    assert pack(torch.tensor([[1, 2, 3, 0]]), 2).tolist() == [[0b00_11_10_01]]


def test_codes_that_do_not_fill_a_byte_are_refused() -> None:
    with pytest.raises(ValueError, match="7 codes of 4 bits do not fill whole bytes: 2 lie in one"):
        pack(torch.zeros(2, 7), 4)


@pytest.mark.parametrize("bits", sorted(STORED))
@pytest.mark.parametrize(("order", "bias"), [(False, False), (True, True)], ids=["plain", "reordered, with a bias"])
def test_a_layer_is_its_definition(bits: int, order: bool, bias: bool) -> None:
    layer, weights = random_layer(bits, bias=bias, order=order)
    close(layer, weights, layer.bias)


@pytest.mark.parametrize("group", [8, 16, 48, 96])
def test_any_group_that_divides_the_inputs_will_do(group: int) -> None:
    layer, weights = random_layer(group=group)
    close(layer, weights)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), scratch=st.integers(1, 4000), lead=st.lists(st.integers(1, 3), max_size=2))
def test_weights_unpacked_piece_by_piece_multiply_as_those_unpacked_at_once(
    rows: int, scratch: int, lead: list[int]
) -> None:
    layer, weights = random_layer(outputs=rows)
    x = torch.randn(*lead, 96, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "SCRATCH", scratch)
        found = layer(x)
    assert found.shape == (*lead, rows)
    torch.testing.assert_close(found, x @ weights.T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_type_of_the_input_and_at_most_twice_the_error_of_plain_weights(dtype: torch.dtype) -> None:
    layer, weights = random_layer(bias=True)
    assert layer.bias is not None
    layer.bias = layer.bias.to(dtype)
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    truth = torch.nn.functional.linear(x.double(), weights, layer.bias.double())
    plain = torch.nn.functional.linear(x, weights.to(dtype), layer.bias)
    found = layer(x)
    assert found.dtype == dtype
    assert (found.double() - truth).abs().max() <= 2 * (plain.double() - truth).abs().max() + 1e-12


def test_joined_layers_give_the_outputs_of_each_end_to_end() -> None:
    layers = [random_layer(outputs=rows, bias=True, seed=rows)[0] for rows in (24, 8, 8)]
    joined = Grouped.joined(layers)
    assert joined is not None and joined.out_features == 40
    x = torch.randn(2, 96, dtype=torch.float64)
    torch.testing.assert_close(joined(x), torch.cat([layer(x) for layer in layers], -1), rtol=1e-12, atol=1e-12)


def test_layers_that_permute_their_inputs_alike_can_be_joined() -> None:
    one, _ = random_layer(order=True)
    other, _ = random_layer(order=True)
    assert Grouped.joined([one, other]) is not None


@pytest.mark.parametrize(
    "other",
    [
        random_layer(bits=8)[0],
        random_layer(group=16)[0],
        random_layer(inputs=64)[0],
        random_layer(bias=True)[0],
        random_layer(order=True)[0],
    ],
    ids=["bits", "group", "inputs", "bias", "order"],
)
def test_layers_that_differ_in_more_than_their_size_are_not_joined(other: Grouped) -> None:
    assert Grouped.joined([random_layer()[0], other]) is None
    assert Grouped.joined([other, random_layer()[0]]) is None


def test_two_orders_are_not_joined() -> None:
    assert Grouped.joined([random_layer(order=True)[0], random_layer(order=True, seed=1)[0]]) is None


def test_a_layer_saves_and_loads_like_any_module() -> None:
    layer, weights = random_layer(order=True, bias=True)
    other, _ = random_layer(order=True, bias=True, seed=1)
    other.load_state_dict(layer.state_dict())
    close(other, weights, layer.bias)


def test_its_memory_is_the_arithmetic() -> None:
    layer, _ = random_layer(bits=4, outputs=64, inputs=256, group=64)
    assert layer.nbytes == 64 * 256 // 2 + 64 * 4 * 2 + 64 * 4 * 4  # codes, float16 scales, float32 offsets


def test_numbers_become_float16_only_where_that_loses_nothing() -> None:
    assert narrowed(torch.tensor([0.5, 0.25])).dtype == torch.float16
    assert narrowed(torch.tensor([0.1])).dtype == torch.float32
    assert narrowed(torch.tensor([1e6])).dtype == torch.float32


def test_scales_that_do_not_fit_are_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"\[24, 4\] scales .* do not fit 24 rows of 96 codes in groups of 32"):
        Grouped(torch.zeros(24, 48, dtype=torch.uint8), torch.ones(24, 4), torch.zeros(24, 4), 4, 32)
    with pytest.raises(ValueError, match="groups of 64 do not divide 96 inputs"):
        Grouped(torch.zeros(24, 48, dtype=torch.uint8), torch.ones(24, 1), torch.zeros(24, 1), 4, 64)
