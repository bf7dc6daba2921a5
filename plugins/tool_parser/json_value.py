"""JSON that arrives in pieces: where a value ends, where it goes wrong, where it may be cut. It knows no tool call."""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string
_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_WORDS = ("true", "false", "null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_HIGH = re.compile(r"\\u[dD][89abAB]")  # first half of a surrogate pair
_ATOM = "+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class NotJson(Exception):
    """The text is no JSON from some character on."""


class JsonValue:
    """Reads one value. Control characters in strings, which models write, become escapes.

    The state is what may come next: a value, a key, a colon, a comma, or inside a string or a number or word.
    """

    def __init__(self) -> None:
        self.done = False
        self._stack: list[str] = []  # { and [ that are open
        self._state = "value"
        self._first = False  # right after { or [
        self._key = False  # the string is a key
        self._atom = ""

    def feed(self, text: str) -> tuple[int, str]:
        """How many characters were read, up to the value's end or to an escape that is not whole, and what they are.

        Raises NotJson where the text can't be the value; its argument is how many characters were read before and what
        they are.
        """
        self._out: list[str] = []
        place = 0
        try:
            while place < len(text) and not self.done:
                before, place = place, self._step(text, place)
                if place == before:
                    break
        except _Wrong as wrong:
            raise NotJson(wrong.args[0], "".join(self._out)) from None
        return place, "".join(self._out)

    def finish(self) -> bool:
        """Whether the value is whole when no text follows: a number has no end of its own."""
        if not self.done and not self._stack and self._state == "atom" and _is_atom(self._atom):
            self.done = True
        return self.done

    def _step(self, text: str, place: int) -> int:
        """The place after the next piece."""
        if self._state == "string":
            return self._string(text, place)
        char = text[place]
        if self._state == "atom":
            if char in _ATOM:
                self._atom += char
                self._out.append(char)
                return place + 1
            if not _is_atom(self._atom):
                raise _Wrong(place)
            self._ended()
            return place if self.done else self._step(text, place)
        if char not in _SPACE:
            self._structure(char, place)
        self._out.append(char)
        return place + 1

    def _structure(self, char: str, place: int) -> None:
        state, first, self._first = self._state, self._first, False
        closes = self._stack and char == ("}" if self._stack[-1] == "{" else "]")
        if closes and (state == "comma" or (first and state in ("key", "value"))):
            self._stack.pop()
            self._ended()
        elif state == "comma" and char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state in ("key", "value") and char == '"':
            self._state, self._key = "string", state == "key"
        elif state == "value" and char in "{[":
            self._stack.append(char)
            self._state, self._first = "key" if char == "{" else "value", True
        elif state == "value" and char in "-0123456789tfn":
            self._state, self._atom = "atom", char
        else:
            raise _Wrong(place)

    def _string(self, text: str, place: int) -> int:
        plain = _PLAIN.match(text, place)
        assert plain is not None
        if plain.end() > place:
            self._out.append(plain.group())
            return plain.end()
        char = text[place]
        if char == '"':
            self._out.append(char)
            if self._key:
                self._state, self._key = "colon", False
            else:
                self._ended()
            return place + 1
        if char != "\\":
            self._out.append(f"\\u{ord(char):04x}")
            return place + 1
        return self._escape(text, place)

    def _escape(self, text: str, place: int) -> int:
        found = _ESCAPE.match(text, place)
        if found is None:
            rest = text[place : place + 6]
            if len(rest) < 6 and re.fullmatch(r"\\(u[0-9a-fA-F]{0,4})?", rest):
                return place  # not whole
            raise _Wrong(place)
        end = found.end()
        if _HIGH.match(found.group()):
            other = text[end : end + 6]
            if len(other) < 6 and re.fullmatch(r"(\\(u([dD]([c-fC-F][0-9a-fA-F]{0,2})?)?)?)?", other):
                return place  # its second half has not come
            if re.fullmatch(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", other):
                end += 6
        self._out.append(text[place:end])
        return end

    def _ended(self) -> None:
        self._state = "comma"
        self.done = not self._stack


class _Wrong(Exception):
    """At this character."""


def _is_atom(text: str) -> bool:
    return text in _WORDS or _NUMBER.fullmatch(text) is not None
