"""Our C++ kernels for the CPU, compiled for this machine when first used and kept. Importing this compiles nothing.

The library has a plain C interface and is called with data pointers, so one build serves every torch and Python. Its
threads come from the OpenMP runtime torch has loaded: a second one would fight it over the cores. Without a compiler, the
best of the libraries that came with the package serves, if any did.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
from pathlib import Path

from turnout.kernels.cache import cache_folder
from turnout.kernels.cpu import build, kept
from turnout.kernels.cpu.build import compiler as compiler

FOLDER = build.FOLDER
FLAGS = (*build.FLAGS, "-shared")
LEVELS = ("widen", "dot", "tiles")  # of bfloat16 products, as gemm16.cpp numbers them
PLAIN = "plain C++"  # of integer products: no instructions for them
SCRATCH = 64 << 20  # bytes a decoder layer's kernels take beside their tensors, at most: `SCRATCH` of layers.cpp
REMEDY = "install a C++ compiler (Debian: apt-get install g++)"

UNKNOWN = 1  # of `Status`
log = logging.getLogger("turnout.kernels")


class NativeError(RuntimeError):
    """The kernels can't be had here; the message says why and what to do."""


class Norm(ctypes.Structure):
    """`struct Norm` of layers.cpp; without a weight there is no norm in that place."""

    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_float), ("plus", ctypes.c_float)]


class Layer(ctypes.Structure):
    """A decoder layer's weights and sizes; `struct Layer` of layers.cpp."""

    _fields_ = [
        *((f"{n}_{part}", ctypes.c_void_p) for n in ("qkv", "o", "gate_up", "down") for part in ("run", "data")),
        *((n, Norm) for n in ("before_attention", "q", "k", "after_attention", "before_mlp", "after_mlp")),
        *((n, ctypes.c_int64) for n in ("dim", "heads", "kv_heads", "head_dim", "hidden", "threads")),
        *((n, ctypes.c_int64) for n in ("dtype", "activation")),
        ("multiplier", ctypes.c_float),
    ]


def check(status: int) -> None:
    """What a kernel returned: 0, or a number of `Status` in linear.h."""
    assert status != UNKNOWN, "a native kernel was asked for a number type it does not know"
    if status:
        raise MemoryError("a native kernel found no memory for its scratch")


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
    found.turnout_pack.restype = None
    found.turnout_panel.restype = number
    found.turnout_rms_norm.argtypes = [pointer, pointer, pointer, number, number, real, real, number, number]
    found.turnout_activate.argtypes = [pointer, pointer, *[number] * 5]
    found.turnout_before_attention.argtypes = [ctypes.POINTER(Layer), *[pointer] * 6, number]
    found.turnout_after_attention.argtypes = [ctypes.POINTER(Layer), *[pointer] * 3, number]
    found.turnout_bf16_level(_level())
    return found


def bfloat16_products() -> str:
    """The instructions that bfloat16 products run on here: the fastest of those the processor has, in a trial when the
    library was loaded, up to what TURNOUT_BF16 allows."""
    return LEVELS[library().turnout_bf16_chosen()]


def integer_products() -> str:
    """The instructions that products of 8-bit integers run on here."""
    function = library().turnout_int8_path
    function.restype = ctypes.c_char_p
    return str(function().decode())


def _level() -> int:
    allowed = os.environ.get("TURNOUT_BF16", LEVELS[-1])
    if allowed not in LEVELS:
        raise NativeError(f"TURNOUT_BF16 must be one of {', '.join(LEVELS)}, got {allowed!r}")
    return LEVELS.index(allowed)


def _built() -> Path:
    if why := obstacle():
        raise NativeError(why)
    tool, ready = compiler(), build.prebuilt()
    if tool is None:
        assert ready is not None
        return ready  # beside this package's own code: as trustworthy as that
    folder = cache_folder() / "native"
    target = folder / f"kernels-{_key(tool)}.so"
    kept.private_folder(folder)
    _trusted(folder)
    if target.exists():
        _trusted(folder, target)
        if kept.is_whole(target):
            return target
        log.warning("%s is damaged; compiling the native kernels anew", target)
    try:
        build.compile_library(tool, _march(), target, kept.seal)
    except build.CompileError as error:
        raise NativeError(str(error)) from error
    return target


def _trusted(folder: Path, file: Path | None = None) -> None:
    """Raise NativeError where somebody else could have put a library."""
    if why := kept.distrust(folder, file):
        raise NativeError(
            f"the native kernels in {folder} are not loaded: {why}; TURNOUT_CACHE=FOLDER names another place"
        )


def _march() -> str:
    return os.environ.get("TURNOUT_MARCH", "native")


def _key(tool: str) -> str:
    parts = [file.read_bytes() for file in build.sources()]
    made = "\0".join([*build.flags(_march()), tool, build.version(tool), build.processor()])
    return hashlib.sha256(b"".join(parts) + made.encode()).hexdigest()[:16]
