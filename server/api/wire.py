"""What both endpoints' replies share: the head that every chunk repeats, and events built from parts made once.

A chunk is made for every token, so it is glued from strings; nothing is validated or copied on the way.
"""

from __future__ import annotations

import json
import time
from json.encoder import encode_basestring_ascii as quote

from turnout.server.api.generation import Job
from turnout.server.api.schema import Generation
from turnout.server.api.service import Service

__all__ = ["Chunks", "head_of", "quote"]


def head_of(service: Service, body: Generation, prefix: str, kind: str) -> dict[str, object]:
    """The fields every reply and chunk begins with. The id carries the request's own, which its route has set."""
    return {
        "id": f"{prefix}-{body.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": service.model,
        "system_fingerprint": service.client.info.fingerprint,
    }


class Chunks:
    """Events of one stream."""

    def __init__(self, head: dict[str, object], body: Generation, job: Job) -> None:
        options = body.stream_options
        self._job, self._continuous = job, options.continuous_usage_stats
        self._wants_usage = options.include_usage
        self._head = f"data: {json.dumps(head, separators=(',', ':'))[:-1]},"
        self._tail = '],"usage":null}\n\n' if self._wants_usage else "]}\n\n"

    def event(self, choice: str, first: str = "") -> str:
        """One chunk with one choice, as JSON text. ASCII: some clients take U+2028 for the end of a line."""
        if self._continuous:
            return f'{self._head}{first}"choices":[{choice}],"usage":{json.dumps(self._job.usage)}}}\n\n'
        return f'{self._head}{first}"choices":[{choice}{self._tail}'

    def last(self) -> str:
        """The chunk that only counts, where it was asked for."""
        return f'{self._head}"choices":[],"usage":{json.dumps(self._job.usage)}}}\n\n' if self._wants_usage else ""
