"""Text that arrives token by token, and the strings that end it. It knows no request and no engine.

What was sent never changes and joined it is the text of all tokens decoded at once. Three things are held back, none
longer than it must be:

    bytes of a character whose last ones have not come      E4 B8 | 96        until it is whole, or can't become so
    a run of <0xNN> tokens, where a tokenizer has those     <0xE4> <0xB8> ..  until another token ends it: one invalid
                                                                              byte makes the whole run invalid
    the beginning of a stop string                          "stop" "ST"       until it is one, or can't become one

`tokenizers.decoders.DecodeStream` would do it but for the end: it has none, so what a cut text owes is lost, and it holds no
stop strings back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from turnout.server.text.stop import StopStrings
from turnout.server.text.tokenizer import Text

NO_STOP = StopStrings()
CONTEXT = 4  # tokens decoded again before new ones


class Detokenizer:
    """The text of one answer. Of several stop strings the one that is complete first counts, then the longest."""

    def __init__(
        self,
        text: Text,
        *,
        prompt_tail: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        stop: StopStrings = NO_STOP,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`prompt_tail`: the prompt's last tokens, where the answer continues its text; without them it begins a text,
        which for some tokenizers has no space at its start. `shown`: special tokens that are not skipped. A stop completed by one of the first `min_tokens` tokens
        is ordinary text."""
        self._skipped = text.special_ids - shown if skip_special_tokens else frozenset()
        self._include_stop, self._min_tokens = include_stop, min_tokens
        tail = [token for token in prompt_tail if token not in self._skipped]
        self._source: _Source = _Bytes(text, tail) if text.bytewise else _Window(text, tail)
        self._stop = stop
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
        if not text or not (self._held or self._stop.begins(text)):
            return text
        whole = self._held + text
        heeded = self.num_tokens_used > self._min_tokens
        ended = self._stop.completed(whole, len(self._held)) if heeded else None
        if ended is None:
            shown = len(whole) - self._stop.num_open(whole)
            self._held = whole[shown:]
        else:
            self.stopped, shown = ended
            shown -= 0 if self._include_stop else len(self.stopped)
            self._held = ""
        return whole[:shown]


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
