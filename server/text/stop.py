"""Stop strings in a text that grows. It keeps no state, so the choices of a request share one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """What ends a text. Of several the one that is complete first counts, then the longest.

    `str.find` on the end of the text: it costs nothing to set up, and a handful of strings is all that requests bring.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError("stop must not contain an empty string")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._firsts = frozenset(stop[0] for stop in stops)

    def begins(self, text: str) -> bool:
        """Whether a stop string may begin in `text`: false is certain."""
        return not self._firsts.isdisjoint(text)

    def completed(self, text: str, seen: int) -> tuple[str, int] | None:
        """The stop string that characters behind the first `seen` complete, and where in `text` it ends."""
        first: tuple[str, int] | None = None
        for stop in self._stops:
            place = text.find(stop, max(0, seen + 1 - len(stop)))
            if place >= 0 and (first is None or place + len(stop) < first[1]):
                first = stop, place + len(stop)
        return first

    def num_open(self, text: str) -> int:
        """Characters at the end of `text` that may begin a stop string."""
        longest = 0
        for stop in self._stops:
            place = max(0, len(text) - len(stop) + 1)
            while (place := text.find(stop[0], place)) >= 0 and len(text) - place > longest:
                if stop.startswith(text[place:]):
                    longest = len(text) - place
                    break
                place += 1
        return longest
