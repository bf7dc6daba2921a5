"""Puts compiled kernels into the wheel where TURNOUT_BUILD_NATIVE=1 asks for them; otherwise the wheel is pure Python.

They are for 64-bit x86 of two kinds, with AVX2 and with AVX-512, and serve machines that have no C++ compiler.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("TURNOUT_BUILD_NATIVE") != "1" or version != "standard":
            return
        place = Path(self.root) / "kernels" / "cpu" / "build.py"
        spec = importlib.util.spec_from_file_location("turnout_native_build", place)
        assert spec is not None and spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        tool = build.compiler()
        if tool is None:
            raise RuntimeError("TURNOUT_BUILD_NATIVE=1 needs a C++ compiler (Debian: apt-get install g++)")
        self._made = tempfile.TemporaryDirectory()  # until the wheel is written
        for level in build.LEVELS:
            target = Path(self._made.name) / f"{level}.so"
            build.compile_library(tool, level, target)
            build_data["force_include"][str(target)] = f"kernels/cpu/prebuilt/{level}.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
