"""Our C++ kernels for the CPU, compiled for this machine when first used and kept. Importing this compiles nothing.

The library has a plain C interface and is called with data pointers, so one build serves every torch and Python. Its
threads come from the OpenMP runtime torch has loaded: a second one would fight it over the cores. Without a compiler, the
best of the libraries that came with the package serves, if any did.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
from pathlib import Path

from turnout.kernels.cache import cache_folder
from turnout.kernels.cpu import build
from turnout.kernels.cpu.build import compiler as compiler

FOLDER = build.FOLDER
FLAGS = (*build.FLAGS, "-shared")
REMEDY = "install a C++ compiler (Debian: apt-get install g++)"


class NativeError(RuntimeError):
    """The kernels can't be had here; the message says why and what to do."""


class Layer(ctypes.Structure):
    """A decoder layer's weights and sizes; `struct Layer` of layers.cpp."""

    _fields_ = [
        *((f"{n}_{part}", ctypes.c_void_p) for n in ("qkv", "o", "gate_up", "down") for part in ("run", "data")),
        *((n, ctypes.c_void_p) for n in ("norm1", "norm2")),
        *((n, ctypes.c_int64) for n in ("dim", "heads", "kv_heads", "head_dim", "hidden", "threads")),
        *((n, ctypes.c_float) for n in ("eps1", "plus1", "eps2", "plus2")),
    ]


def obstacle() -> str | None:
    """Why the kernels can't be had here, found without compiling; None: they should be."""
    if os.name != "posix" or platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return f"the native kernels are not made for {platform.system()} on {platform.machine()}"
    if compiler() is None and build.prebuilt() is None:
        return (
            f"its compiled kernels are absent and there is no C++ compiler to build them with; {REMEDY}, or a wheel of "
            "turnout that carries them (made with TURNOUT_BUILD_NATIVE=1)"
        )
    return None


def kernels() -> str:
    """A name of the native code that runs here: another source, compiler or machine has another. Empty: none runs."""
    if obstacle():
        return ""
    tool, ready = compiler(), build.prebuilt()
    if tool is None and ready is not None:
        return f"native {ready.stem} {hashlib.sha256(ready.read_bytes()).hexdigest()[:16]}"
    return f"native {_key(str(tool))}"


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, compiled if this machine has not done so yet. Raises NativeError."""
    import torch  # noqa: F401  its OpenMP runtime must be the one that is found

    try:
        found = ctypes.CDLL(str(_built()))
    except OSError as error:
        raise NativeError(f"the native kernels do not load: {error}") from error
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    found.turnout_pack.argtypes = [pointer, pointer, number, number]
    found.turnout_panel.restype = number
    found.turnout_rms_norm.argtypes = [pointer, pointer, pointer, number, number, real, real, number]
    found.turnout_rotate.argtypes = [*[pointer] * 6, *[number] * 7]
    found.turnout_silu_mul.argtypes = [pointer, pointer, number, number, number]
    found.turnout_before_attention.argtypes = [ctypes.POINTER(Layer), *[pointer] * 6, number]
    found.turnout_after_attention.argtypes = [ctypes.POINTER(Layer), *[pointer] * 3, number]
    for name in ("before_attention", "after_attention", "pack", "rms_norm", "rotate", "silu_mul"):
        getattr(found, f"turnout_{name}").restype = None
    return found


def _built() -> Path:
    if why := obstacle():
        raise NativeError(why)
    tool, ready = compiler(), build.prebuilt()
    if tool is None:
        assert ready is not None
        return ready
    target = cache_folder() / "native" / f"kernels-{_key(tool)}.so"
    if not target.exists():
        try:
            build.compile_library(tool, _march(), target)
        except build.CompileError as error:
            raise NativeError(str(error)) from error
    return target


def _march() -> str:
    return os.environ.get("TURNOUT_MARCH", "native")


def _key(tool: str) -> str:
    parts = [file.read_bytes() for file in build.sources()]
    made = "\0".join([*build.flags(_march()), tool, build.processor()])
    return hashlib.sha256(b"".join(parts) + made.encode()).hexdigest()[:16]
