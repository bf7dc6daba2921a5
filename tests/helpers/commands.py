"""How the tests call `turnout ab`."""

from __future__ import annotations

from collections.abc import Callable

Ab = Callable[..., tuple[int, str, str]]  # arguments -> exit code, what it printed, what it complained
QUICK = ("max_tokens=6", "rounds=0", "workload=short")
