"""The blocks of llama.cpp's quantized types as codes, scales and offsets. It knows no file and no layer.

A row is blocks of 32 weights (Q4_0 to Q8_0) or 256 (the K types, whose sub-blocks of 32 or 16 have scales of their own,
small integers times one float16 of the block). The layouts are ggml's: github.com/ggml-org/ggml, src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Codes(NamedTuple):
    """W[o, i] = scales[o, g] * codes[o, i] + offsets[o, g], g = i // group."""

    codes: Tensor  # uint8 [out, in]
    scales: Tensor  # float16 or float32 [out, groups]
    offsets: Tensor  # likewise
    bits: int
    group: int


def codes(kind: str, rows: Tensor) -> Codes:
    """rows: uint8 [out, bytes of a row]. Scales are exact for blocks of 32; those of the K types, products of a float16
    and a small integer, are rounded to float16 (by 1 in 2048 at most; the offset with them) unless they are too small for
    that. Raises ValueError for rows that are no whole blocks."""
    size, unpack = _KINDS[kind]
    if rows.shape[1] % size:
        raise ValueError(f"rows of {rows.shape[1]} bytes are no whole blocks of {kind}, {size} bytes each")
    return unpack(rows.view(len(rows), -1, size))


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at that byte of each block, [out, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _row(parts: Tensor) -> Tensor:
    """[out, blocks, ...] -> [out, all]."""
    return parts.flatten(1)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] -> [..., 2n]: all low ones, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _split(packed: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return packed.reshape(*packed.shape[:-1], *sizes)


def _fifth(blocks: Tensor, at: int) -> Tensor:
    """A block's 32 high bits, [out, blocks, 32], as 16 or 0."""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[..., at : at + 4, None] >> places) & 1).flatten(-2) << 4


def _around(codes: Tensor, scales: Tensor, zero: int, bits: int, group: int) -> Codes:
    """Codes less `zero` are the weights' signed multiples of the scale."""
    exact = scales.float()
    offsets = -zero * exact
    fits = scales.dtype == torch.float16 and bool((offsets.abs() <= 65504).all())
    return Codes(codes, scales, offsets.half() if fits else offsets, bits, group)


def _rounded(values: Tensor) -> Tensor:
    """float16 where that is within 1 in 2048 of every value, tiny ones beside the largest left out; else as they are."""
    half, size = values.half(), values.abs()
    close = (half.float() - values).abs() <= size / 2048 + size.amax() / (1 << 20)
    return half if bool(close.all()) else values


def _q4_0(blocks: Tensor) -> Codes:
    return _around(_row(_nibbles(blocks[..., 2:])), _half(blocks, 0), 8, 4, 32)


def _q4_1(blocks: Tensor) -> Codes:
    return Codes(_row(_nibbles(blocks[..., 4:])), _half(blocks, 0), _half(blocks, 2), 4, 32)


def _q5_0(blocks: Tensor) -> Codes:
    return _around(_row(_nibbles(blocks[..., 6:]) | _fifth(blocks, 2)), _half(blocks, 0), 16, 5, 32)


def _q5_1(blocks: Tensor) -> Codes:
    return Codes(_row(_nibbles(blocks[..., 8:]) | _fifth(blocks, 4)), _half(blocks, 0), _half(blocks, 2), 5, 32)


def _q8_0(blocks: Tensor) -> Codes:
    return _around(_row(blocks[..., 2:] ^ 128), _half(blocks, 0), 128, 8, 32)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima in the 12 bytes of a K block, [out, blocks, 8] each."""
    first, second, mixed = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (mixed & 15) | (first >> 6 << 4)], dim=-1)
    minima = torch.cat([second & 63, (mixed >> 4) | (second >> 6 << 4)], dim=-1)
    return scales, minima


def _k(blocks: Tensor, values: Tensor, bits: int) -> Codes:
    """values: [out, blocks, 256]."""
    scales, minima = _six_bits(blocks[..., 4:16])
    scale, minimum = (_half(blocks, at).float()[..., None] for at in (0, 2))
    return Codes(_row(values), _rounded(_row(scale * scales)), _rounded(_row(-minimum * minima)), bits, 32)


def _q4_k(blocks: Tensor) -> Codes:
    quads = _split(blocks[..., 16:], 4, 32)  # each holds two sub-blocks
    return _k(blocks, _nibbles(quads).flatten(-2), 4)


def _q5_k(blocks: Tensor) -> Codes:
    quads, high = _split(blocks[..., 48:], 4, 32), blocks[..., None, 16:48]
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = ((high >> places) & 1) << 4  # [out, blocks, 8, 32]: bit n of a byte is of sub-block n
    return _k(blocks, _nibbles(quads).flatten(-2) | fifth.flatten(-2), 5)


def _q6_k(blocks: Tensor) -> Codes:
    low = _split(blocks[..., :128], 2, 64)  # each holds 128 weights: four times 32
    high = _split(blocks[..., 128:192], 2, 1, 32)
    places = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device=blocks.device)
    values = _split(_nibbles(low), 4, 32) | ((high >> places) & 3) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _half(blocks, 208).float()[..., None]
    return _around(_row(values), _rounded(_row(scales)), 32, 6, 16)


_KINDS: dict[str, tuple[int, Callable[[Tensor], Codes]]] = {  # type -> bytes of a block, and what reads them
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
KINDS = frozenset(_KINDS)
