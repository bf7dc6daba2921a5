"""A streamed completion as tokens and an end, from the bytes that arrive. It reads no clock and no socket."""

from __future__ import annotations

import json
from typing import Any

MOST = 200  # characters of an error that are kept


class Reply:
    """Feed it what came from the wire; `num_tokens` of each feed is what came with it."""

    def __init__(self) -> None:
        self._rest = b""
        self.tokens: list[int] = []  # where the server tells them
        self.num_cached = 0
        self.fingerprint = ""
        self.error: str | None = None
        self._counted = 0
        self._usage: int | None = None
        self._ended = False

    def feed(self, data: bytes) -> int:
        """How many tokens came with this piece of the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        before = self._counted
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())
        return self._counted - before

    def close(self) -> int:
        """The stream has ended: how many tokens the server counted that were seen in no event. They came with the last one."""
        if self.error is None and not self._ended:
            self.error = "disconnected: the stream ended before the answer did"
        return max((self._usage or 0) - self._counted, 0)

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            event: dict[str, Any] = json.loads(data)
            self._take(event)
        except (ValueError, TypeError, AttributeError, LookupError):
            self.error = self.error or f"not understood: {data[:MOST].decode(errors='replace')}"

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            error = event["error"]
            said = error.get("message", error) if isinstance(error, dict) else error
            self.error = f"error in the stream: {str(said)[:MOST]}"
            return
        self.fingerprint = event.get("system_fingerprint") or self.fingerprint
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids")
            if ids:
                self.tokens += ids
            self._counted += len(ids) if ids is not None else bool(choice.get("text"))
            self._ended = self._ended or choice.get("finish_reason") is not None
        usage = event.get("usage")
        if usage:
            self._usage = usage.get("completion_tokens")
            self.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
