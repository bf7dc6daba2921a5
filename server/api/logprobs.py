"""Log-probabilities as clients read them: the chat form, the completions form, and vLLM's form for prompts.

A number that JSON or a client cannot hold, such as minus infinity, is written -9999.0. A token that is no whole text by
itself is written with its bytes in hexadecimal: `bytes:\\xe6\\x97` in completions, `\\xe6\\x97` in chats. With
`return_tokens_as_token_ids` every token is written `token_id:` and its id, so that no two are written alike.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from turnout.core.types import Logprobs
from turnout.server.text.tokenizer import Text

LOWEST = -9999.0

Entry = dict[str, object]
Pieces = dict[str, list[object]]  # tokens, token_logprobs, top_logprobs, text_offset


def finite(logprob: float) -> float:
    return max(LOWEST, logprob)  # NaN is not above it


class TokenNames:
    """How token ids are written. One per server: ids are looked up once."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def of(self, token: int) -> tuple[str, bytes | None]:
        """The token's text, and its bytes when those are not a text by themselves."""
        found = self._known.get(token)
        if found is None:
            raw = self._text.token_bytes(token)
            try:
                found = raw.decode(), None
            except UnicodeDecodeError:
                found = "".join(f"\\x{byte:02x}" for byte in raw), raw
            self._known[token] = found
        return found

    def raw(self, token: int) -> bytes:
        name, raw = self.of(token)
        return name.encode() if raw is None else raw

    def special(self, token: int) -> bool:
        return token in self._text.special_ids


class ChatLogprobs:
    """Entries of `logprobs.content`. Special tokens have null bytes where the text leaves them out."""

    def __init__(self, names: TokenNames, *, skip_special_tokens: bool, as_ids: bool = False) -> None:
        self._names, self._skip, self._as_ids = names, skip_special_tokens, as_ids

    def of(self, entries: Iterable[Logprobs]) -> Entry:
        """The `logprobs` object of a choice or chunk."""
        content = [
            self._entry(entry.token, entry.logprob) | {"top_logprobs": [self._entry(*pair) for pair in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Entry:
        hidden = self._skip and self._names.special(token)
        raw = None if hidden else list(self._names.raw(token))
        name = f"token_id:{token}" if self._as_ids else self._names.of(token)[0]
        return {"token": name, "logprob": finite(logprob), "bytes": raw}


class CompletionLogprobs:
    """The four parallel lists of a completion, handed out piece by piece; offsets count from the start of the text."""

    def __init__(self, names: TokenNames, num_top: int, *, skip_special_tokens: bool, as_ids: bool = False) -> None:
        self._names, self._num_top, self._skip, self._as_ids = names, num_top, skip_special_tokens, as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the text before the next token

    def prompt(self, first: int, entries: Sequence[Logprobs], text: str) -> Pieces:
        """The prompt's tokens, of which the first has no probability. `text` is the prompt as it is echoed."""
        pieces = self._empty()
        self._add(pieces, first, None, (), shown=self._begins(first, text))
        for entry in entries:
            self._add(pieces, entry.token, entry.logprob, entry.top, shown=self._begins(entry.token, text))
        self._offset = len(text)
        self._decoder.reset()
        return pieces

    def of(self, entries: Iterable[Logprobs]) -> Pieces:
        """The `logprobs` object of generated tokens."""
        pieces = self._empty()
        for entry in entries:
            self._add(
                pieces,
                entry.token,
                entry.logprob,
                entry.top,
                shown=not (self._skip and self._names.special(entry.token)),
            )
        return pieces

    def _begins(self, token: int, text: str) -> bool:
        """Whether a prompt's token is part of its text: a start token that the tokenizer added is not."""
        return not self._names.special(token) or text.startswith(self._names.of(token)[0], self._offset)

    @staticmethod
    def _empty() -> Pieces:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add(
        self,
        pieces: Pieces,
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
        *,
        shown: bool,
    ) -> None:
        pieces["tokens"].append(self._name(token))
        pieces["token_logprobs"].append(None if logprob is None else finite(logprob))
        pieces["top_logprobs"].append(None if logprob is None else self._top(token, logprob, top))
        pieces["text_offset"].append(self._offset)
        if shown:
            self._offset += len(self._decoder.decode(self._names.raw(token)))

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        name, raw = self._names.of(token)
        return name if raw is None else f"bytes:{name}"

    def _top(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The chosen token first, then the likeliest. Of two tokens with one text, the later one goes by its id."""
        chosen = {self._name(token): finite(logprob)}
        for other, value in top[: self._num_top]:
            name = self._name(other)
            if other != token:
                chosen[f"token_id:{other}" if name in chosen else name] = finite(value)
        return chosen


def prompt_logprobs(names: TokenNames, entries: Iterable[Logprobs], num_top: int) -> list[dict[str, Entry] | None]:
    """One entry a prompt token, by token id; null for the first."""
    forms: list[dict[str, Entry] | None] = [None]
    for entry in entries:
        ranked = [(entry.token, entry.logprob, entry.rank)]
        ranked += [
            (token, value, rank) for rank, (token, value) in enumerate(entry.top[:num_top], 1) if token != entry.token
        ]
        forms.append(
            {
                str(token): {"logprob": finite(value), "rank": rank, "decoded_token": names.of(token)[0]}
                for token, value, rank in ranked
            }
        )
    return forms
