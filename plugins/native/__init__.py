"""Our C++ kernels for the CPU, compiled for this machine when first used and kept. Importing this compiles nothing.

The library has a plain C interface and is called with data pointers, so one build serves every torch and Python. Its
threads come from the OpenMP runtime torch has loaded: a second one would fight it over the cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from turnout.plugins.cache import cache_folder

FOLDER = Path(__file__).parent  # of the *.cpp and *.h
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno")
REMEDY = "install a C++ compiler (Debian: apt-get install g++)"


class NativeError(RuntimeError):
    """The kernels can't be had here; the message says why and what to do."""


class Plan(ctypes.Structure):
    """What is the same for every layer; `struct Plan` of attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("table", "query_start", "kv_lens", "slots")),
        *((name, ctypes.c_int64) for name in ("num_requests", "width", "num_tokens")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "v_dim", "block_size", "window", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class Layer(ctypes.Structure):
    """A decoder layer's weights and sizes; `struct Layer` of layers.cpp."""

    _fields_ = [
        *((f"{n}_{part}", ctypes.c_void_p) for n in ("qkv", "o", "gate_up", "down") for part in ("run", "data")),
        *((n, ctypes.c_void_p) for n in ("norm1", "norm2")),
        *((n, ctypes.c_int64) for n in ("dim", "heads", "kv_heads", "head_dim", "hidden", "threads")),
        *((n, ctypes.c_float) for n in ("eps1", "plus1", "eps2", "plus2")),
    ]


def compiler() -> str | None:
    """The C++ compiler: $CXX, else g++ or clang++."""
    wanted = os.environ.get("CXX")
    return shutil.which(wanted) if wanted else shutil.which("g++") or shutil.which("clang++")


def obstacle() -> str | None:
    """Why the kernels can't be had here, found without compiling; None: they should be."""
    if os.name != "posix" or platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return f"the native kernels are not made for {platform.system()} on {platform.machine()}"
    if compiler() is None:
        return f"there is no C++ compiler to build its kernels with; {REMEDY}"
    return None


def kernels() -> str:
    """A name of the native code that runs here: another source, compiler or machine has another. Empty: none runs."""
    tool = compiler()
    return "" if obstacle() or tool is None else f"native {_key(tool)}"


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, compiled if this machine has not done so yet. Raises NativeError."""
    import torch  # noqa: F401  its OpenMP runtime must be the one that is found

    try:
        found = ctypes.CDLL(str(_built()))
    except OSError as error:
        raise NativeError(f"the native kernels do not load: {error}") from error
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    found.turnout_attend.argtypes = [ctypes.POINTER(Plan), *[pointer] * 7]
    found.turnout_pack.argtypes = [pointer, pointer, number, number]
    found.turnout_panel.restype = number
    found.turnout_rms_norm.argtypes = [pointer, pointer, pointer, number, number, real, real, number]
    found.turnout_rotate.argtypes = [*[pointer] * 6, *[number] * 7]
    found.turnout_silu_mul.argtypes = [pointer, pointer, number, number, number]
    found.turnout_before_attention.argtypes = [ctypes.POINTER(Layer), *[pointer] * 6, number]
    found.turnout_after_attention.argtypes = [ctypes.POINTER(Layer), *[pointer] * 3, number]
    for name in ("attend", "before_attention", "after_attention", "pack", "rms_norm", "rotate", "silu_mul"):
        getattr(found, f"turnout_{name}").restype = None
    return found


def _built() -> Path:
    why, tool = obstacle(), compiler()
    if why or tool is None:
        raise NativeError(why or REMEDY)
    target = cache_folder() / "native" / f"kernels-{_key(tool)}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        draft = Path(scratch) / target.name
        done = subprocess.run(
            [tool, *_flags(), "-o", str(draft), *map(str, sorted(FOLDER.glob("*.cpp")))],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NativeError(f"{tool} could not compile the native kernels: {done.stderr.strip()[-600:]}")
        draft.replace(target)  # whole or not at all, whoever else compiles at the same time
    return target


def _flags() -> list[str]:
    return [*FLAGS, f"-march={os.environ.get('TURNOUT_MARCH', 'native')}"]


def _key(tool: str) -> str:
    sources = [file.read_bytes() for file in sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")))]
    return hashlib.sha256(b"".join(sources) + "\0".join([*_flags(), tool, _machine()]).encode()).hexdigest()[:16]


def _machine() -> str:
    """What the compiler's -march=native depends on: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
