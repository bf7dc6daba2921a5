"""Which tokens a server means by what it writes for them. It knows no request."""

from __future__ import annotations

from collections.abc import Mapping

from turnout.server.api.logprobs import LOWEST, TokenNames
from turnout.server.text.tokenizer import Text

ID = "token_id:"


class TokenIds:
    """Token ids of what servers write for tokens."""

    def __init__(self, text: Text) -> None:
        self._names = TokenNames(text)
        self._vocab_size = text.vocab_size
        self._written: dict[str, int] | None = None  # text -> the lowest id written so

    def of(self, name: str) -> int | str:
        """The text itself where no token is written so."""
        if name.startswith(ID) and name[len(ID) :].isdecimal():
            return int(name[len(ID) :])
        if self._written is None:
            self._written = {}
            for token in range(self._vocab_size):
                self._written.setdefault(self._spelled(token), token)
        return self._written.get(name, name)

    def fits(self, name: str, token: int) -> bool:
        """Whether `token` may be written so: ids must be the same; texts may lack a space, or be broken characters."""
        if name.startswith(ID):
            return name == f"{ID}{token}"
        spelled = self._names.of(token)[0].strip()
        return name.strip() in (spelled, f"bytes:{spelled}") or "\ufffd" in name or not name.isascii()

    def top(self, written: Mapping[str, float], token: int, num_top: int) -> tuple[tuple[int | str, float], ...]:
        """The likeliest, best first. Of several tokens with one text, it is the one that was forced."""
        own = self._spelled(token)
        pairs = [
            (token if name == own else self.of(name), max(float(value), LOWEST)) for name, value in written.items()
        ]
        return tuple(sorted(pairs, key=lambda pair: -pair[1])[:num_top])

    def _spelled(self, token: int) -> str:
        name, raw = self._names.of(token)
        return name if raw is None else f"bytes:{name}"
