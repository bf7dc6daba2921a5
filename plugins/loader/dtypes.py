"""Where a model computes and in which floating-point type. It knows no model."""

from __future__ import annotations

import torch

from turnout.core import ModelError
from turnout.kernels import cpu as native

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # in /proc/cpuinfo; x86: the first two, ARM: the last


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pick_device(asked: str) -> torch.device:
    """ "auto" is the first GPU where torch sees one, else the CPU; "cpu", "cuda" and "cuda:N" are obeyed or refused."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return torch.device("cuda:0" if gpus else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device={asked} is unknown; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= gpus:
            raise ModelError(f"device={asked} is not there: torch sees {gpus} CUDA devices; device=auto takes what is")
    return device


def pick_dtype(
    asked: str, stored: torch.dtype, device: torch.device, quantized: bool = False, units: frozenset[str] | None = None
) -> tuple[torch.dtype, str]:
    """The type to serve in, and why.

    A named type is obeyed. "auto" is the checkpoint's type, except that it becomes float32 where that type would crawl.
    On a CPU that is: where the native kernels can't be had, bfloat16 without bfloat16 units, and float16. With them 16-bit
    weights are never slower than float32: they are widened in registers where there is nothing better, and half as many
    bytes are read. A quantized checkpoint's float16 becomes float32: its weights stay in the bits they have.
    `units`: the kinds of number the device computes in by itself, where a test says so.
    """
    if asked in DTYPES:
        return DTYPES[asked], f"dtype={asked} was asked for"
    if asked != "auto":
        raise ModelError(f"dtype={asked} is unknown; choose auto, {', '.join(DTYPES)}")
    if stored not in DTYPES.values():
        raise ModelError(
            f"the checkpoint's type is {short(stored)}, which can't be computed in; name one: dtype=float32"
        )
    if stored not in (torch.float16, torch.bfloat16):
        return stored, f"{short(stored)}: the checkpoint's own type"
    able = _units(device) if units is None else units
    if short(stored) in able:
        return stored, f"{short(stored)}: the checkpoint's own type"
    if "native" in able and not (quantized and stored == torch.float16):
        return stored, (
            f"{short(stored)}: the checkpoint's own type; this {device.type} has no units for it, and the native kernels "
            f"widen it on the way, which reads half of float32's bytes"
        )
    return torch.float32, f"float32: the checkpoint is {short(stored)}, and this {device.type} has no units for it"


def _units(device: torch.device) -> frozenset[str]:
    """Which 16-bit types the device computes in by itself; "native": our kernels widen the others on the way."""
    if device.type == "cuda":
        known = torch.cuda.is_bf16_supported(including_emulation=False)
        return frozenset({"float16", "bfloat16"} if known else {"float16"})
    return cpu_units(native.build.features(), native.obstacle() is None)


def cpu_units(features: frozenset[str], kernels: bool) -> frozenset[str]:
    """`features`: the processor's, in Linux's names; none are known of some. `kernels`: ours can be had."""
    return frozenset({"bfloat16"} if features & BF16_FLAGS else ()) | ({"native"} if kernels else set())
