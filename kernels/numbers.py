"""Numbers that kernels of several languages agree on. It knows no kernel."""

from __future__ import annotations

LEAST = 1e-30  # numbers whose largest is below this count as zeros when they are rounded to 8 bits; int8.cpp has it too
