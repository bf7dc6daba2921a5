"""Fused siblings compute what each layer computed alone, in whatever order and with whatever input they are called."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from turnout.plugins.loader.fuse import Part, fuse


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(48, 36, bias=bias), nn.Linear(48, 12, bias=bias)
        self.v_proj = nn.Linear(48, 12, bias=bias)


def twins(bias: bool) -> tuple[Attention, Attention]:
    torch.manual_seed(0)
    plain, fused = Attention(bias), Attention(bias)
    fused.load_state_dict(plain.state_dict())
    assert fuse(fused) == 1
    return plain, fused


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(["q_proj", "k_proj", "v_proj"])))
@torch.inference_mode()
def test_the_order_of_the_calls_does_not_matter(bias: bool, order: tuple[str, ...]) -> None:
    plain, fused = twins(bias)
    for num in (1, 5):
        x = torch.randn(1, num, 48)
        for name in order:
            torch.testing.assert_close(getattr(fused, name)(x), getattr(plain, name)(x))


@torch.inference_mode()
def test_another_input_is_computed_alone_and_a_second_call_is_not_served_from_the_first() -> None:
    plain, fused = twins(bias=True)
    x, y = torch.randn(1, 3, 48), torch.randn(1, 3, 48)
    fused.q_proj(x)
    torch.testing.assert_close(fused.k_proj(y), plain.k_proj(y))
    torch.testing.assert_close(fused.k_proj(x), plain.k_proj(x))
    x.mul_(2)
    torch.testing.assert_close(fused.k_proj(x), plain.k_proj(x))


@torch.inference_mode()
def test_nothing_is_kept_once_every_sibling_has_fetched_its_output() -> None:
    _, fused = twins(bias=False)
    x = torch.randn(1, 3, 48)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(fused, name)(x)
    assert isinstance(fused.q_proj, Part)
    assert fused.q_proj.shared._input is None and not fused.q_proj.shared._outputs


def test_weights_are_stored_once_and_still_found_by_name() -> None:
    plain, fused = twins(bias=True)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(fused.state_dict()[name], tensor)
    storages = {p.untyped_storage().data_ptr() for n, p in fused.named_parameters() if n.endswith("weight")}
    assert len(storages) == 1


def test_layers_that_are_not_alike_stay_as_they_are() -> None:
    mixed = Attention()
    mixed.v_proj = nn.Linear(48, 12, bias=True)
    other = Attention()
    other.v_proj = nn.Sequential(nn.Linear(48, 12))  # type: ignore[assignment]
    assert fuse(mixed) == 0 and fuse(other) == 0
