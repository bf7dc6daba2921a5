"""Compiles the C++ kernels. It needs nothing but the standard library, so that a wheel can be built with it.

A machine with a compiler makes a library for itself, once. A wheel may carry libraries for kinds of machine
(`TURNOUT_BUILD_NATIVE=1 pip wheel .`, see `hatch_build.py`): those serve where there is no compiler.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent  # of the *.cpp and *.h
PREBUILT = FOLDER / "prebuilt"  # of LEVEL.so, in wheels that carry them
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno")

AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
LEVELS = {"x86-64-v4": AVX2 | AVX512, "x86-64-v3": AVX2}  # what each needs, in Linux's names; the best first


class CompileError(RuntimeError):
    """What the compiler said."""


def compiler() -> str | None:
    """The C++ compiler: $CXX, else g++ or clang++."""
    wanted = os.environ.get("CXX")
    return shutil.which(wanted) if wanted else shutil.which("g++") or shutil.which("clang++")


@functools.cache
def version(tool: str) -> str:
    """What the compiler says it is: another version may compile another library."""
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def sources() -> list[Path]:
    return sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")))


def flags(march: str) -> list[str]:
    return [*FLAGS, f"-march={march}"]


def compile_library(tool: str, march: str, target: Path, finish: Callable[[Path], None] = lambda made: None) -> None:
    """Make `target`, whole or not at all, whoever else makes it at the same time; `finish` sees it before it gets its
    name. Raises CompileError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        folder = Path(scratch)

        def compiled(source: Path) -> str:
            made = str(folder / f"{source.stem}.o")
            _run(tool, *flags(march), "-c", "-o", made, str(source))
            return made

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = list(pool.map(compiled, sorted(FOLDER.glob("*.cpp"))))
        _run(tool, *flags(march), "-shared", "-o", str(folder / target.name), *parts)
        made_whole = folder / target.name
        finish(made_whole)
        made_whole.replace(target)


def _run(tool: str, *arguments: str) -> None:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{tool} could not compile the native kernels: {done.stderr.strip()[-600:]}")


@functools.cache
def features() -> frozenset[str]:
    """What this machine's processor can do, in Linux's names; nothing where that can't be read."""
    return frozenset(processor().partition(":")[2].split())


def processor() -> str:
    """The line of /proc/cpuinfo with the processor's features: what the compiler's -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def prebuilt() -> Path | None:
    """The best library that came with the package and runs here."""
    fitting = (PREBUILT / f"{level}.so" for level, needs in LEVELS.items() if needs <= features())
    return next((file for file in fitting if file.exists()), None)
