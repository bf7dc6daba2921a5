"""What the rules of attention backends stand on: a backend, made anew, on the best device it has here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import torch
from torch import Tensor

from turnout.core.interfaces import AttentionBackend, Capabilities
from turnout.core.optional import MachineCheck, RefusingBackend
from turnout.testing.attention import compared
from turnout.testing.attention_cases import attention_cases, selected_cases
from turnout.testing.attention_scene import AttentionCase, Part, Scene

if TYPE_CHECKING:
    import pytest


class AttentionSuite:
    """`make` builds a backend. `device`: where it is tried; None: a GPU if it runs on one and one is here, else the CPU.
    `cases` and `selected` may be overridden by less where a backend is slow, as in an interpreter."""

    make: Callable[[], AttentionBackend[Any, Any]]
    device: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        found = getattr(self.make, "capabilities", None)
        return found if isinstance(found, Capabilities) else self.make().capabilities

    @property
    def on(self) -> str:
        if self.device is not None:
            return self.device
        devices = self.capabilities.devices or {"cpu", "cuda"}
        return "cuda" if "cuda" in devices and (torch.cuda.is_available() or "cpu" not in devices) else "cpu"

    @property
    def missing(self) -> str | None:
        """Why the backend can't be tried here."""
        absent = [name for name in self.capabilities.needs if importlib.util.find_spec(name.split(".")[0]) is None]
        if absent:
            return f"{', '.join(absent)} not installed"
        if self.on == "cuda" and not torch.cuda.is_available():
            return "it needs a GPU, and there is none"
        return self.make.obstacle() if isinstance(self.make, MachineCheck) else None

    def setup_method(self) -> None:
        """pytest calls it before each test."""
        if why := self.missing:
            raise SkipTest(why)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each case of the grid."""
        if "case" in metafunc.fixturenames:
            cases = self.cases()
            metafunc.parametrize("case", cases, ids=[case.name for case in cases])

    def cases(self) -> list[AttentionCase]:
        """The whole grid."""
        return [case for case in attention_cases(self.capabilities, self.on) if not self._refused(case)]

    def selected(self) -> list[AttentionCase]:
        """The few that each other rule is tried on."""
        return [case for case in selected_cases(self.capabilities, self.on) if not self._refused(case)]

    def _refused(self, case: AttentionCase) -> list[str]:
        """What the backend itself turns down, beside its capabilities."""
        backend, where = self.make(), torch.device(case.device)
        if not isinstance(backend, RefusingBackend):
            return []
        return backend.refusals([case.layer], case.block_size, case.dtype, where, case.cache_dtype)

    def scene(self, case: AttentionCase, beneath: int = 0) -> Scene:
        return Scene(self.make(), case, beneath=beneath)


def holds(scene: Scene, got: Tensor, parts: Sequence[Part] | None = None, when: str = "") -> None:
    """Raises AssertionError, naming the case, unless the answers are as near to the truth as they must be."""
    try:
        compared(scene, got, parts).check()
    except AssertionError as error:
        raise AssertionError(f"{scene.case.name}{when and ', '}{when}: {error}") from None
