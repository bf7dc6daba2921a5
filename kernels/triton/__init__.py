"""Triton kernels that several plugins share, and what each must know of where they run. It knows no core.

Nothing here imports triton: the modules of kernels do, and they are imported when one of them is chosen. On a machine
without a GPU the kernels run in Triton's interpreter, for tests only, if TRITON_INTERPRET=1 was set before triton was
first imported by anybody in the process; it is thousands of times slower than a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in the interpreter: its dot product does not know bfloat16, nor its casts how to round."""
    from triton.runtime.jit import JITFunction

    return not isinstance(kernel, JITFunction)


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 in the interpreter, so that work is split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether the GPU converts float8_e4m3fn by itself: compute capability 8.9 or above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest one that is neither below `number` nor below `least`."""
    return max(least, 1 << (number - 1).bit_length())


@contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """Triton launches on the current device, wherever the tensors lie."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        yield
    else:
        with torch.cuda.device(device):
            yield
