"""Memory for weights in large pages. It knows no layer.

A decode step reads every weight once. In pages of 4 KiB, finding where each one lies takes as long as reading it:
measured on a virtual machine, products of one row ran 1.3 to 2 times as fast over weights in pages of 2 MiB (Linux's
transparent huge pages, asked for with madvise). Where there are none, this is ordinary memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 2 << 20  # bytes of a large page
CHUNK = 16 << 20  # bytes taken at once; what is not used of them stays unclaimed
ALIGN = 64  # bytes: a cache line
MADV_HUGEPAGE = 14


class _Arena:
    """Hands out memory from large pieces; a piece lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned."""
        with self._lock:
            if self._used + num_bytes > len(self._chunk):
                if num_bytes > CHUNK // 2:
                    return _large(num_bytes)
                self._chunk, self._used = _large(CHUNK), 0
            start = self._used
            self._used += -(-num_bytes // ALIGN) * ALIGN
            return self._chunk[start : start + num_bytes]


def _large(num_bytes: int) -> Tensor:
    whole = torch.empty(num_bytes + LARGE, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a C library without madvise
            address, size = whole.data_ptr() + start, num_bytes // LARGE * LARGE
            ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return whole[start : start + num_bytes]


@functools.cache
def _arena() -> _Arena:
    return _Arena()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU."""
    return _arena().take(math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))


def settled(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
