"""Text that arrives token by token, and the strings that end it. It knows no request and no engine.

What was sent never changes and joined it is the text of all tokens decoded at once. Three things are held back, none
longer than it must be:

    bytes of a character whose last ones have not come      E4 B8 | 96        until it is whole, or can't become so
    a run of <0xNN> tokens, where a tokenizer has those     <0xE4> <0xB8> ..  until another token ends it: one invalid
                                                                              byte makes the whole run invalid
    the beginning of a stop string                          "stop" "ST"       until it is one, or can't become one
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from turnout.server.text.tokenizer import Text

CONTEXT = 4  # tokens decoded again before new ones


class Detokenizer:
    """The text of one answer. Of several stop strings the one that is complete first counts, then the longest."""

    def __init__(
        self,
        text: Text,
        *,
        prompt_tail: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`prompt_tail`: the prompt's last tokens, where the answer continues its text; without them it begins a text,
        which for some tokenizers has no space at its start. A stop completed by one of the first `min_tokens` tokens
        is ordinary text."""
        self._skipped = text.special_ids if skip_special_tokens else frozenset()
        self._include_stop, self._min_tokens = include_stop, min_tokens
        shown = [token for token in prompt_tail if token not in self._skipped]
        self._source: _Source = _Bytes(text, shown) if text.bytewise else _Window(text, shown)
        self._stops = _Stops(stop) if stop else None
        self._held = ""  # may be the beginning of a stop string
        self._sent: list[str] = []
        self.stopped: str | None = None  # the stop string that ended the text
        self.num_tokens_used = 0  # tokens pushed, up to the one that completed the stop string

    @property
    def text(self) -> str:
        """All that was returned so far."""
        self._sent = ["".join(self._sent)]
        return self._sent[0]

    def push(self, tokens: Sequence[int]) -> str:
        """The text that may be sent now. After a stop string tokens are ignored."""
        pieces = []
        for token in tokens:
            if self.stopped is not None:
                break
            self.num_tokens_used += 1
            if token not in self._skipped:
                pieces.append(self._passed(self._source.push(token)))
        return self._send("".join(pieces))

    def finish(self) -> str:
        """The rest, when no token follows. Bytes that make no character become U+FFFD."""
        if self.stopped is not None:
            return ""
        rest = self._passed(self._source.finish()) + self._held
        self._held = ""
        return self._send(rest)

    def _send(self, text: str) -> str:
        if text:
            self._sent.append(text)
        return text

    def _passed(self, text: str) -> str:
        """What of the held and the new text can't be part of a stop string any more."""
        if self._stops is None or not text:
            return text
        ended = self._stops.read(text, heed=self.num_tokens_used > self._min_tokens)
        whole = self._held + text
        if ended is None:
            keep = len(whole) - self._stops.num_open
        else:
            self.stopped, end = ended
            keep = len(self._held) + end - (0 if self._include_stop else len(self.stopped))
        self._held = whole[keep:] if ended is None else ""
        return whole[:keep]


class _Source(Protocol):
    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


class _Bytes:
    """For tokenizers whose text is the joined bytes of the tokens."""

    def __init__(self, text: Text, context: Sequence[int]) -> None:
        self._bytes_of, self._decoder = text.token_bytes, codecs.getincrementaldecoder("utf-8")("replace")
        for token in context:
            self.push(token)

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """For the others: decode a few tokens already shown together with the new ones, and take what is new.

        shown:  ... the  cat | sat    _on          sat       -> "sat"       only its length matters
        new:                           _the        sat _the  -> "sat the"   new text: " the"

    The context has to have a text, or the new tokens would stand at the start of one. It ends with no <0xNN> token.
    """

    def __init__(self, text: Text, context: Sequence[int]) -> None:
        self._text = text
        context = [token for token in context if text.knows(token)]
        cut = len(context)
        while cut and text.is_byte(context[cut - 1]):
            cut -= 1
        self._pending = context[cut + _whole(context[cut:], text) :]  # the bytes of a character begun in the prompt
        self._keep(context[:cut] or [text.anchor] * bool(context))

    def push(self, token: int) -> str:
        if not self._text.knows(token):
            return ""
        self._pending.append(token)
        return "" if self._text.is_byte(token) else self.finish()

    def finish(self) -> str:
        if not self._pending:
            return ""
        tokens = self._context + self._pending
        text = self._decode(tokens)[self._length :]
        self._pending = []
        self._keep(tokens)
        return text

    def _keep(self, tokens: list[int]) -> None:
        """The shortest end of `tokens` that serves as context."""
        size = CONTEXT
        while not (text := self._decode(tokens[-size:])) and size < len(tokens):
            size *= 2
        self._context, self._length = tokens[-size:], len(text)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._text.decode(tokens, skip_special_tokens=False)


def _whole(tokens: Sequence[int], text: Text) -> int:
    """How many of these byte tokens make whole characters, or none at all."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(map(text.token_bytes, tokens)))
    return len(tokens) - len(decoder.getstate()[0])


class _Stops:
    """Looks for all stop strings at once (Aho and Corasick, 1975), in time that grows with the text alone.

    A state is a beginning of a stop string; it is the longest one with which the text read so far ends.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("stop must not contain an empty string")
        self._next: list[dict[str, int]] = [{}]
        self._depth, self._fall = [0], [0]  # its length; the longest shorter beginning it ends with
        self._stop: list[str | None] = [None]  # the longest stop string it ends with
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._firsts = frozenset(self._next[0])

    @property
    def num_open(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return self._depth[self._state]

    def read(self, text: str, *, heed: bool) -> tuple[str, int] | None:
        """The stop string completed first and where in `text` it ends, if `heed`."""
        if not self._state and self._firsts.isdisjoint(text):
            return None
        state, following, fall = self._state, self._next, self._fall
        for place, char in enumerate(text, 1):
            while state and char not in following[state]:
                state = fall[state]
            state = following[state].get(char, 0)
            stop = self._stop[state]
            if stop is not None:
                if heed:
                    return stop, place
                while state and not following[state]:  # passed over, and no longer one begins like this
                    state = fall[state]
        self._state = state
        return None

    def _add(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(depth)
                self._fall.append(0)
                self._stop.append(None)
            state = self._next[state][char]
        self._stop[state] = stop

    def _link(self) -> None:
        """Set `fall`, shorter states first."""
        states = deque(self._next[0].values())
        while states:
            parent = states.popleft()
            if self._stop[parent] is None:
                self._stop[parent] = self._stop[self._fall[parent]]
            for char, state in self._next[parent].items():
                fall = self._fall[parent]
                while fall and char not in self._next[fall]:
                    fall = self._fall[fall]
                self._fall[state] = self._next[fall].get(char, 0)
                states.append(state)
