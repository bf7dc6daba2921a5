"""The 8-bit forms of the key/value cache, written out: what a backend's cache must hold, up to its layout.

Each token of each head has a scale of its own, so a token's codes never change when others join its block:

    int8  scale = amax / 127, code = round(x / scale)               symmetric, ties to even
    fp8   scale = amax / 448, code = x / scale as float8_e4m3fn     448 is the largest number of that format
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "fp8": 448.0}  # what the largest element of a token's head becomes
NEAR = 1e-3  # two codes are about as good for what lies so close to the middle between them, relative


class Kept(NamedTuple):
    """Keys or values as an 8-bit cache keeps them."""

    codes: Tensor  # int8 or float8_e4m3fn, of the shape of what was kept
    scales: Tensor  # float32, without the last dimension; 0 for a head of zeros


def keep(x: Tensor, form: str) -> Kept:
    """x: [..., dim] of any float dtype; one scale for each of the leading indices."""
    scales = x.float().abs().amax(-1) / LARGEST[form]
    return Kept(_codes(_scaled(x, scales), form), scales)


def restore(kept: Kept) -> Tensor:
    """Float64 [..., dim]."""
    return kept.codes.to(torch.float64) * kept.scales[..., None].double()


def settled(x: Tensor, form: str) -> Tensor:
    """x without what lies in the middle between two codes, where the last bit of a division would decide: those elements
    are moved onto a code. Whoever keeps the rest by the rule above, in whatever order, has the same codes."""
    y = _scaled(x, x.float().abs().amax(-1) / LARGEST[form])
    low, high = (_codes(y * (1 + sign * NEAR), form) for sign in (-1, 1))
    return torch.where(low.float() == high.float(), x, restore(keep(x, form)).to(x.dtype))


def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    return (
        (x.float() / scales[..., None]).nan_to_num(0.0) if bool((scales == 0).any()) else x.float() / scales[..., None]
    )


def _codes(y: Tensor, form: str) -> Tensor:
    if form == "int8":
        return y.round().clamp(-127, 127).to(torch.int8)
    return y.clamp(-448, 448).to(torch.float8_e4m3fn)
