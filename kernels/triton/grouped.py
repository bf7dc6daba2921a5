"""The GPU kernel of weights that are small integers in groups: codes are widened tile by tile on their way to the matrix units (W4A16 and kin).

The codes in one byte stand for neighbouring inputs, so a tile of bytes is multiplied once for each place in a byte, with
the inputs of that place: nothing is shuffled, and each byte is read once. With 4 bits:

    byte      0       1       2      ...
    place 0   code 0  code 2  code 4     times x[0], x[2], x[4], ...
    place 1   code 1  code 3  code 5     times x[1], x[3], x[5], ...

Weights are rounded to the inputs' dtype as the torch kernel rounds them; sums are float32. Where outputs are too few to
fill the GPU, inputs are split among programs and the parts added in a fixed order. Importing this imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnout.kernels.triton import interpreted, launching_on, num_processors, power_of_two
from turnout.kernels.triton.codes import narrow

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TILE_OUTS = 64
TILE_BYTES = 64  # of codes of one output
MOST_ROWS = 64  # of inputs in a tile
MOST_PARTS = 16  # of the inputs, among programs


def runs_on(device: torch.device) -> bool:
    return device.type == "cuda" or interpreted(_product)


def product(x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, group: int, size: int) -> Tensor:
    """x: contiguous [T, in] of one of DTYPES; codes: uint8 [out, in * size / 8], `size` bits each; scales, offsets: floats
    [out, in / group], a group a whole number of bytes. Returns [T, out] in x's dtype."""
    (rows, ins), outs = x.shape, len(codes)
    out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tile_rows = min(power_of_two(rows, 16), MOST_ROWS)
    tiles, num_bytes = -(-outs // TILE_OUTS) * -(-rows // tile_rows), ins * size // 8
    steps = -(-num_bytes // TILE_BYTES)
    wanted = min(-(-2 * num_processors(x.device) // tiles), MOST_PARTS, steps)
    steps_of_part = -(-steps // wanted)
    parts = -(-steps // steps_of_part)
    sums = out if parts == 1 else torch.empty(parts, rows, outs, device=x.device)
    with launching_on(x.device):
        _product[(-(-outs // TILE_OUTS), -(-rows // tile_rows), parts)](
            x, codes, scales, offsets, sums, rows, outs, num_bytes, steps_of_part,
            INS=ins, GROUP=group, SIZE=size, TILE_ROWS=tile_rows, TILE_OUTS=TILE_OUTS, TILE_BYTES=TILE_BYTES,
            INTERPRETED=interpreted(_product), num_warps=4, num_stages=3,
        )  # fmt: skip
    return out if parts == 1 else sums.sum(0).to(x.dtype)


@triton.jit(do_not_specialize=["rows", "steps"])
def _product(
    x, codes, scales, offsets, out, rows, outs, num_bytes, steps,
    INS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUTS: tl.constexpr,
    TILE_BYTES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of outputs, tiles of rows, parts of the inputs). x: [rows, INS]; codes: [outs, num_bytes]; out:
    [parts, rows, outs]."""
    PER: tl.constexpr = 8 // SIZE
    output = tl.program_id(0) * TILE_OUTS + tl.arange(0, TILE_OUTS)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    there, asked = output < outs, row < rows
    weight_row, input_row = output.to(tl.int64) * num_bytes, row.to(tl.int64) * INS
    group_row = output.to(tl.int64) * (INS // GROUP)
    total = tl.full([TILE_ROWS, TILE_OUTS], 0.0, tl.float32)
    begin = tl.program_id(2) * steps * TILE_BYTES
    for start in range(begin, min(begin + steps * TILE_BYTES, num_bytes), TILE_BYTES):
        at = start + tl.arange(0, TILE_BYTES)
        here = (at < num_bytes)[:, None] & there[None, :]
        packed = tl.load(codes + weight_row[None, :] + at[:, None], mask=here, other=0).to(tl.int32)
        group = group_row[None, :] + (at * PER // GROUP)[:, None]
        scale = tl.load(scales + group, mask=here, other=0.0).to(tl.float32)
        offset = tl.load(offsets + group, mask=here, other=0.0).to(tl.float32)
        for place in tl.static_range(PER):
            code = (packed >> (place * SIZE)) & ((1 << SIZE) - 1)
            weight = narrow(code.to(tl.float32) * scale + offset, x.dtype.element_ty, INTERPRETED)
            inputs = tl.load(
                x + input_row[:, None] + (at * PER + place)[None, :],
                mask=asked[:, None] & (at < num_bytes)[None, :], other=0.0,
            )  # fmt: skip
            if INTERPRETED:
                total += tl.dot(inputs.to(tl.float32), weight.to(tl.float32), input_precision="ieee")
            else:
                total = tl.dot(inputs, weight, total, input_precision="ieee")
    target = out + tl.program_id(2).to(tl.int64) * rows * outs + row.to(tl.int64)[:, None] * outs + output[None, :]
    tl.store(target, narrow(total, out.dtype.element_ty, INTERPRETED), mask=asked[:, None] & there[None, :])
