"""What one block manager has of its own: how cached prefixes are found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from turnout.core import Request
from turnout.plugins.blocks.tier import Key


class Found(NamedTuple):
    """A cached prefix: its full blocks, those in host memory as ~slot, and one of which only the first tokens fit."""

    blocks: list[int]
    part: int = -1  # block; -1: none
    num_part: int = 0  # tokens of it


class Finder(ABC):
    """Knows where the contents are that have a number."""

    @abstractmethod
    def publish(self, request: Request) -> None:
        """Let its full, computed blocks be found, each with a number, and write these into its chain."""

    @abstractmethod
    def _find(self, tokens: list[int], end: int, salt: str | None) -> Found:
        """The longest cached prefix within the first `end` tokens."""

    @abstractmethod
    def _insert(self, block: int, key: Key, before: int | None, salt: str | None) -> None:
        """Let a block be found, whose number is set. `before`: the one it follows; None: it is a first one."""

    @abstractmethod
    def _drop(self, block: int) -> Key:
        """Let it be found no more. Nothing is found only behind it."""

    @abstractmethod
    def _behind(self, block: int) -> list[int]:
        """It, and what is found only through it; the furthest first."""

    @abstractmethod
    def _victim(self) -> int:
        """The idle block that gives way next."""
