"""Triton kernels over a paged cache: store keys and values, attend, put parts together. Imported when they are chosen.

One kernel attends for prompts and decodes alike. A program takes a tile of consecutive queries of one request with all
the heads that share one key head, so that a key is read once for them; its rows are

    row            0  1  2   3  4  5   ...
    query          first     first + 1            of the request's queries
    head           0  1  2   0  1  2              of the group of 3

and it goes over the keys as FlashAttention does (arXiv 2205.14135, 2307.08691). The keys of a decode may be split
among several programs, whose parts `reduce` puts together (Flash-Decoding, 2023). Nothing depends on the lengths but
the loops, so a recorded launch serves other lengths. Powers are of 2: `scale` and `cap` come multiplied by log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from turnout.kernels.triton.codes import narrow, round_to_even, to_fp8, widen


@triton.jit
def _store(x, codes, scales, row, slot, real, DIM: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
           FORM: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Keys or values of some rows: x points at the first element of each, codes and scales at the whole cache."""
    at = tl.arange(0, PAD)
    here = real[:, None] & (at < DIM)[None, :]
    values = tl.load(x[:, None] + at[None, :], mask=here, other=0.0)
    place = slot * HEADS + row % HEADS
    if FORM == "float":
        tl.store(codes + place[:, None] * DIM + at[None, :], values, mask=here)
    else:
        wide = values.to(tl.float32)
        most: tl.constexpr = 127.0 if FORM == "int8" else 448.0
        spoiled = tl.sum(wide * 0.0, 1)  # NaN where an element is NaN or infinite: so is the scale, then
        scale = tl.max(tl.abs(wide), 1) / most + spoiled
        wide = wide / tl.where(scale > 0, scale, 1.0)[:, None]
        kept = round_to_even(wide).to(tl.int8) if FORM == "int8" else to_fp8(wide)
        tl.store(codes + place[:, None] * DIM + at[None, :], kept, mask=here)
        tl.store(scales + place, scale, mask=real)


@triton.jit(do_not_specialize=["rows"])
def store(
    k, v, keys, values, key_scales, value_scales, slots, rows,
    stride_kt, stride_kh, stride_vt, stride_vh,
    HEADS: tl.constexpr, TILE: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, PAD: tl.constexpr, V_PAD: tl.constexpr,
    FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows); a row is one head of one token. k, v: [tokens, HEADS, DIM], any strides but the last; the
    caches are contiguous, [slots, HEADS, DIM], their scales [slots, HEADS]. A negative slot is skipped."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    slot = tl.load(slots + token, mask=row < rows, other=-1)
    real = slot >= 0
    source = k + token * stride_kt + head * stride_kh
    _store(source, keys, key_scales, row, slot, real, DIM, PAD, HEADS, FORM, INTERPRETED)
    source = v + token * stride_vt + head * stride_vh
    _store(source, values, value_scales, row, slot, real, V_DIM, V_PAD, HEADS, FORM, INTERPRETED)


@triton.jit(do_not_specialize=["stride_table", "window", "splits"])
def attend(
    q, keys, values, key_scales, value_scales, sinks, out, part_out, part_size,
    block_table, query_start, kv_lens, tile_request, tile_first,
    stride_qt, stride_qh, stride_table, scale, cap, window, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, PAD: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FORM: tl.constexpr, MAPPED: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, key heads, splits). A tile is QUERIES queries of request tile_request[tile] from tile_first[tile]
    on; without MAPPED, the only query of request `tile`.

    q: [T, HEADS * GROUP, DIM], any strides but the last; keys, values: [slots, HEADS, DIM], contiguous; out: [T, heads,
    V_DIM], contiguous. With SPLIT the parts go to part_out, float32 [tiles, heads, splits, V_DIM], and part_size, the
    base-2 logarithm of each part's sum of powers.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    if MAPPED:
        request, first = tl.load(tile_request + tile), tl.load(tile_first + tile)
    else:
        request, first = tile, 0
    start_row = tl.load(query_start + request)
    num_queries = tl.load(query_start + request + 1) - start_row
    num_keys = tl.load(kv_lens + request)

    row = tl.arange(0, BLOCK_M)
    query, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    real = (row < QUERIES * GROUP) & (query < num_queries)
    position = num_keys - num_queries + query  # the last query sees the last key
    at, v_at = tl.arange(0, PAD), tl.arange(0, V_PAD)
    wanted = (start_row + query).to(tl.int64)
    asked = tl.load(
        q + wanted[:, None] * stride_qt + head[:, None] * stride_qh + at[None, :],
        mask=real[:, None] & (at < DIM)[None, :], other=0.0,
    )  # fmt: skip

    # Keys from `low` to before `high` are seen by some query of the tile; all before `full` by all of them.
    earliest = tl.maximum(num_keys - num_queries + first, 0)
    high = tl.minimum(num_keys, num_keys - num_queries + first + QUERIES)
    seen_from = tl.maximum(earliest - window + 1, 0) if WINDOWED else 0
    low = seen_from // BLOCK_N * BLOCK_N
    if SPLIT:
        share = tl.maximum((high - low + BLOCK_N * splits - 1) // (BLOCK_N * splits), 0) * BLOCK_N
        low += tl.program_id(2) * share
        high = tl.minimum(high, low + share)
    full = tl.maximum(tl.minimum((earliest + 1) // BLOCK_N * BLOCK_N, high // BLOCK_N * BLOCK_N), low)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    sum_out = tl.full([BLOCK_M, V_PAD], 0.0, tl.float32)
    for edge in tl.static_range(2):  # first where every query sees every key, then where not
        begin, end = (full, high) if edge else (low, full)
        for start in range(begin, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            known = (n >= seen_from) & (n < high)  # what lies in the other slots may be NaN
            block = tl.load(block_table + request.to(tl.int64) * stride_table + n // BLOCK_SIZE, mask=known, other=0)
            slot = (block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE) * HEADS + kv_head
            codes = tl.load(
                keys + slot[None, :] * DIM + at[:, None], mask=known[None, :] & (at < DIM)[:, None], other=0
            )
            k = codes if FORM == "float" else widen(codes, FORM, asked.dtype, INTERPRETED)
            if INTERPRETED:
                logits = tl.dot(asked.to(tl.float32), k.to(tl.float32), input_precision="ieee")
            else:
                logits = tl.dot(asked, k, input_precision="ieee")
            if FORM != "float":
                logits *= tl.load(key_scales + slot, mask=known, other=0.0)[None, :]
            logits *= scale
            if CAPPED:  # cap * tanh(logits), with the one power that can't overflow
                power = tl.exp2(-2.8853900817779268 * tl.abs(logits))
                size = (1.0 - power) / (1.0 + power) * cap
                logits = tl.where(logits < 0, -size, size)
            if edge:
                logits = tl.where((n[None, :] <= position[:, None]) & known[None, :], logits, float("-inf"))
            if WINDOWED:
                logits = tl.where(n[None, :] > position[:, None] - window, logits, float("-inf"))

            higher = tl.maximum(largest, tl.max(logits, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen so far
            weights = tl.exp2(logits - base[:, None])
            faded = tl.exp2(largest - base)
            total = total * faded + tl.sum(weights, 1)
            sum_out *= faded[:, None]
            largest = higher
            codes = tl.load(
                values + slot[:, None] * V_DIM + v_at[None, :],
                mask=known[:, None] & (v_at < V_DIM)[None, :], other=0,
            )  # fmt: skip
            v = codes if FORM == "float" else widen(codes, FORM, asked.dtype, INTERPRETED)
            if FORM != "float":
                weights *= tl.load(value_scales + slot, mask=known, other=0.0)[None, :]
            weights = narrow(weights, asked.dtype, INTERPRETED)
            if INTERPRETED:
                sum_out += tl.dot(weights.to(tl.float32), v.to(tl.float32), input_precision="ieee")
            else:
                sum_out = tl.dot(weights, v, sum_out, input_precision="ieee")

    if SINKS and not SPLIT:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(largest, sink)
        faded = tl.exp2(largest - higher)
        total = total * faded + tl.exp2(sink - higher)
        sum_out *= faded[:, None]
    answer = sum_out / tl.where(total == 0.0, 1.0, total)[:, None]  # a row that sees nothing: zeros
    into = real[:, None] & (v_at < V_DIM)[None, :]
    if SPLIT:
        part = (tile.to(tl.int64) * HEADS * GROUP + head) * splits + tl.program_id(2)
        tl.store(part_out + part[:, None] * V_DIM + v_at[None, :], answer, mask=into)
        size = tl.where(total == 0.0, float("-inf"), largest + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(part_size + part, size, mask=real)
    else:
        target = (wanted * HEADS * GROUP + head)[:, None] * V_DIM + v_at[None, :]
        tl.store(out + target, narrow(answer, out.dtype.element_ty, INTERPRETED), mask=into)


@triton.jit(do_not_specialize=["splits"])
def reduce(
    part_out, part_size, sinks, out, query_start, tile_request, splits,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    MAPPED: tl.constexpr, SINKS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of one query, heads). Weighs each part by its share of the powers; sinks join here."""
    tile, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tile_request + tile) if MAPPED else tile
    wanted = tl.load(query_start + request).to(tl.int64)
    each, v_at = tl.arange(0, SPLITS_PAD), tl.arange(0, V_PAD)
    part = (tile.to(tl.int64) * HEADS + head) * splits + each
    size = tl.load(part_size + part, mask=each < splits, other=float("-inf"))
    largest = tl.max(size, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(size - base)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - base)
    parts = tl.load(
        part_out + part[:, None] * V_DIM + v_at[None, :],
        mask=(each < splits)[:, None] & (v_at < V_DIM)[None, :], other=0.0,
    )  # fmt: skip
    answer = tl.sum(weights[:, None] * parts, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (wanted * HEADS + head) * V_DIM + v_at, narrow(answer, out.dtype.element_ty, INTERPRETED),
             mask=v_at < V_DIM)  # fmt: skip
