"""How the kernels are launched: tile sizes, warps, pipeline stages, parts. It knows no kernel and no tensor.

The defaults are reasoned, not measured: what a tile of keys, one of values and the queries take in shared memory, times
the stages, stays below the 99 KiB a block has on every GPU since Ampere (A100: 163, Hopper: 227). The test that compiles
the kernels for both holds them to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnout.kernels.triton import power_of_two

MOST_PARTS = 64  # of one decode's keys
PROGRAMS = 4  # wanted for each processor: some load while others compute


@dataclass(frozen=True)
class Launch:
    """One launch of `attend`."""

    block_m: int  # rows of a tile: queries times the heads that share a key head, padded
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int


def prompt_launch(pad: int, itemsize: int, group: int) -> Launch:
    """pad: the larger head size as a power of two; itemsize: bytes of an element of q; group: heads a key head."""
    wide = pad * itemsize  # bytes of a key
    if itemsize == 4:  # no matrix unit computes float32: small tiles, or their registers spill
        found = Launch(16, 32, 8, 1) if pad > 128 else Launch(32, 32, 8 if pad > 64 else 4, 2)
    elif wide <= 128:
        found = Launch(128, 64, 8, 3)
    elif wide <= 256:
        found = Launch(128, 64, 8, 2)
    else:
        found = Launch(64, 32, 8, 2)
    return Launch(power_of_two(group, found.block_m), found.block_n, found.num_warps, found.num_stages)


def decode_launch(pad: int, itemsize: int, group: int) -> Launch:
    """Reading the cache is all: as many keys in flight as shared memory holds."""
    wide = pad * itemsize
    block_n = 128 if wide <= 128 else 64 if wide <= 256 else 32 if wide <= 512 else 16
    return Launch(power_of_two(group, 16), block_n, 4, 2 if block_n > 16 else 1)


def parts(tiles: int, num_kv_heads: int, most_keys: int, block_n: int, processors: int) -> int:
    """Among how many programs a decode's keys are split; of the shapes of a batch alone, never of its lengths.

    most_keys: what the block table could hold. A part has at least two tiles of keys.
    """
    wanted = -(-PROGRAMS * processors // max(tiles * num_kv_heads, 1))
    return max(1, min(wanted, MOST_PARTS, most_keys // (2 * block_n)))
