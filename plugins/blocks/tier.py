"""The host tier: blocks that gave way in the cache and can come back. It knows keys and slots; it moves no bytes.

A slot is a block of host memory. One that is read or written by the moves of the step being made is locked until those
have settled: the step writes host memory before it reads it. What came back keeps its slot, so that giving way again
costs no copy; the least recently used slot goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

Key = tuple[int | str | None, bytes]  # number of the block before it, or the salt; its tokens


class Entry(NamedTuple):
    slot: int
    number: int  # of the contents, as in the cache
    used_at: float  # seconds on the engine's clock


class HostTier:
    """Finds contents by the same keys as the cache."""

    def __init__(self, num_slots: int, ttl: float | None) -> None:
        self._ttl = ttl
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._keys: dict[int, Key] = {}  # slot -> key
        self._locked: set[int] = set()
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, now: float) -> None:
        """A step begins: what nobody used for the time to live is forgotten."""
        self._now = now
        while self._entries and self._dead(next(iter(self._entries.values()))):
            self.forget(next(iter(self._entries.values())).slot)

    def find(self, key: Key) -> Entry | None:
        entry = self._entries.get(key)
        return None if entry is None or self._dead(entry) else entry

    def keep(self, key: Key, number: int, used_at: float) -> int | None:
        """A slot to write the contents to. None: they are there already, or every slot is locked."""
        if key in self._entries:
            self._entries[key] = self._entries[key]._replace(number=number, used_at=used_at)
            self._entries.move_to_end(key)
            return None
        if not self._free:
            slot = next((e.slot for e in self._entries.values() if e.slot not in self._locked), None)
            if slot is None:
                return None
            self.forget(slot)
        slot = self._free.pop()
        self._entries[key], self._keys[slot] = Entry(slot, number, used_at), key
        self._locked.add(slot)
        return slot

    def fetch(self, slot: int) -> tuple[Key, int]:
        """Key and number of contents about to be read; the slot is locked."""
        key = self._keys[slot]
        self._entries[key] = entry = self._entries[key]._replace(used_at=self._now)
        self._entries.move_to_end(key)
        self._locked.add(slot)
        return key, entry.number

    def forget(self, slot: int) -> None:
        del self._entries[self._keys.pop(slot)]
        self._free.append(slot)

    def settle(self, lost: Iterable[int]) -> None:
        """The step is over; nothing was written to the slots that are `lost`."""
        for slot in lost:
            self.forget(slot)
        self._locked.clear()

    def _dead(self, entry: Entry) -> bool:
        return self._ttl is not None and entry.used_at + self._ttl <= self._now and entry.slot not in self._locked
