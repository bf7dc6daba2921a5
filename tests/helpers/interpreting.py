"""Whether Triton's interpreter is what runs kernels in this process, for the tests that need it."""

from __future__ import annotations

import importlib.util
import os


def _obstacle() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: it comes with the extra `test` on Linux"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton compiles for the GPU here; TRITON_INTERPRET=1 runs its interpreter instead"
    return None


NO_INTERPRETER = _obstacle()
