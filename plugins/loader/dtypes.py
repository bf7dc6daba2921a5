"""Where a model computes and in which floating-point type. It knows no model."""

from __future__ import annotations

from pathlib import Path

import torch

from turnout.core import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


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
    asked: str, stored: torch.dtype, device: torch.device, bf16_units: bool | None = None
) -> tuple[torch.dtype, str]:
    """The type to serve in, and why.

    A named type is obeyed. "auto" is the checkpoint's type, except that it becomes float32 where that type would crawl:
    bfloat16 on a device without bfloat16 units, float16 on a CPU.
    """
    if asked in DTYPES:
        return DTYPES[asked], f"dtype={asked} was asked for"
    if asked != "auto":
        raise ModelError(f"dtype={asked} is unknown; choose auto, {', '.join(DTYPES)}")
    if stored not in DTYPES.values():
        raise ModelError(
            f"the checkpoint's type is {short(stored)}, which can't be computed in; name one: dtype=float32"
        )
    if stored == torch.float16 and device.type == "cpu":
        return torch.float32, "float32: the checkpoint is float16, and CPUs have no units for it"
    if stored == torch.bfloat16 and not (has_bf16_units(device) if bf16_units is None else bf16_units):
        return torch.float32, f"float32: the checkpoint is bfloat16, and this {device.type} has no units for it"
    return stored, f"{short(stored)}: the checkpoint's own type"


def has_bf16_units(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether bfloat16 matrix products run in hardware. A CPU whose flags can't be read counts as one without."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":", 1)[1].split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})  # x86: the first two; ARM: the last
