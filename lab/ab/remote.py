"""A server that speaks the OpenAI API as a side.

Forced tokens are scored by POST /v1/completions with the token ids as the prompt, `echo` and `logprobs`. Tokens are asked for
as ids (`return_tokens_as_token_ids`, which vLLM and Turnout know); what another server writes as text is looked up in the
tokenizer of the side that is here, and stays a text where no token is written so.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from turnout.core.types import Sampling
from turnout.lab.ab.token_ids import TokenIds
from turnout.lab.compare.measures import Mark
from turnout.lab.compare.sides import Item, Scored, SideError, Speed, Written
from turnout.server.text.tokenizer import Text

AT_ONCE = 64  # requests under way
TIMEOUT = 600.0  # seconds without a byte
EXTENSIONS: Mapping[str, object] = {
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "ignore_eos": True,
    "add_special_tokens": False,
}

Values = dict[str, Any]
T = TypeVar("T")


class ServerSide:
    """One server. Raises SideError when it is not there or offers no log-probabilities of a prompt."""

    def __init__(
        self,
        name: str,
        url: str,
        text: Text,
        *,
        model: str | None = None,
        api_key: str | None = None,
        dtype: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.name, self._url, self._runs = name, url, 0
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=AT_ONCE)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, limits=limits, transport=transport)
        self._ids = TokenIds(text)
        self._extensions: Mapping[str, object] = EXTENSIONS
        try:
            self._model = model or self._models()[0]
            info = self._info()
            fingerprint = self._probe(text)
        except SideError:
            self.close()
            raise
        self.dtype = dtype or str(info.get("dtype", ""))
        self.draws = "turnout" if "turnout" in (info.get("versions") or {}) else ""
        kept = ("composition", "plugins", "versions", "notes", "device")
        self.origin: Mapping[str, object] = {
            "kind": "server",
            "url": url,
            "model": self._model,
            "fingerprint": fingerprint,
        } | {key: info[key] for key in kept if key in info}

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    def score(self, items: Sequence[Item], num_top: int, *, prompts: bool) -> dict[str, Scored]:
        def one(item: Item) -> Scored:
            ids = [*item.prompt, *item.continuation]
            fields = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": num_top}
            marks = self._marks(self._complete(fields), ids, num_top)
            return Scored(marks[: len(item.prompt) - 1] if prompts else [], marks[len(item.prompt) - 1 :])

        return self._all(items, one)

    def write(self, items: Sequence[Item], samplings: Mapping[str, Sampling], num_top: int) -> dict[str, Written]:
        def one(item: Item) -> Written:
            s = samplings[item.id]
            fields: Values = {"prompt": list(item.prompt), "max_tokens": s.max_tokens, "temperature": s.temperature}
            choice = self._complete(fields | {"logprobs": num_top} | ({} if s.seed is None else {"seed": s.seed}))
            marks = self._written(choice, num_top)
            return Written(tuple(int(mark.token) for mark in marks), marks)

        return self._all(items, one)

    def race(self, items: Sequence[Item], max_tokens: int) -> Speed:
        self._runs += 1
        extensions = {**self._extensions, "cache_salt": f"race {self._runs}"} if self._extensions else {}
        began = time.perf_counter()

        def one(item: Item) -> list[float]:
            """When each of its tokens came, seconds from the start of all."""
            body = {"prompt": list(item.prompt), "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
            came: list[float] = []
            with self._client.stream(
                "POST", "/v1/completions", json=body | {"model": self._model} | extensions
            ) as reply:
                if reply.status_code != httpx.codes.OK:
                    reply.read()
                    raise self._refused(reply)
                for line in reply.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        came += [time.perf_counter() - began] * _tokens_in(json.loads(data))
            return came

        found = self._all(items, one)
        speed = Speed(time.perf_counter() - began)
        for came in found.values():
            speed.num_tokens += len(came)
            speed.ttft += came[:1]
            speed.itl += [late - early for early, late in itertools.pairwise(came)]
        return speed

    def _all(self, items: Iterable[Item], one: Callable[[Item], T]) -> dict[str, T]:
        listed = list(items)
        with ThreadPoolExecutor(max(1, min(AT_ONCE, len(listed)))) as pool:
            try:
                return dict(zip([item.id for item in listed], pool.map(one, listed), strict=True))
            except httpx.HTTPError as error:
                raise self._lost(error) from error

    def _complete(self, fields: Values) -> Values:
        """The one choice of a completion."""
        reply = self._client.post("/v1/completions", json={"model": self._model, **fields, **self._extensions})
        if reply.status_code != httpx.codes.OK:
            raise self._refused(reply)
        found: Values = reply.json()
        self._fingerprint = found.get("system_fingerprint")
        choice: Values = found["choices"][0]
        return choice

    def _probe(self, text: Text) -> object:
        """Find out what the server takes. Returns its fingerprint."""
        ids = [text.anchor, text.anchor]
        fields: Values = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
        try:
            choice = self._complete(fields)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        except SideError:  # the API's strict reading: an unknown field is an error
            self._extensions = {}
            choice = self._complete(fields)
        self._marks(choice, ids, 1)
        return self._fingerprint

    def _marks(self, choice: Values, ids: Sequence[int], num_top: int) -> list[Mark]:
        """One mark a token of the prompt but the first."""
        found = choice.get("logprobs") or {}
        logprobs, tops = found.get("token_logprobs") or [], found.get("top_logprobs") or []
        if len(logprobs) < len(ids) or len(tops) < len(ids) or any(value is None for value in logprobs[1 : len(ids)]):
            raise SideError(
                f"{self.name} gave log-probabilities of {len(logprobs)} tokens where {len(ids)} were asked for: "
                "/v1/completions with echo and logprobs has to score a prompt given as token ids, or nothing can be forced"
            )
        for position, (name, token) in enumerate(zip(found.get("tokens") or [], ids, strict=False)):
            if not self._ids.fits(name, token):
                raise SideError(
                    f"{self.name} reads token {token} at position {position} as {name!r}: its tokenizer is another one"
                )
        return [
            Mark(token, float(logprob), self._ids.top(top or {}, token, num_top))
            for token, logprob, top in zip(ids[1:], logprobs[1 : len(ids)], tops[1 : len(ids)], strict=True)
        ]

    def _written(self, choice: Values, num_top: int) -> list[Mark]:
        found = choice.get("logprobs") or {}
        names = found.get("tokens") or []
        ids = choice.get("token_ids") or [self._ids.of(name) for name in names]
        if any(not isinstance(token, int) for token in ids) or len(ids) != len(names):
            raise SideError(f"{self.name} wrote tokens that the tokenizer here does not know: {names!r:.100}")
        rows = zip(ids, found["token_logprobs"], found["top_logprobs"], strict=True)
        return [Mark(token, float(logprob), self._ids.top(top or {}, token, num_top)) for token, logprob, top in rows]

    def _models(self) -> list[str]:
        try:
            reply = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if reply.status_code != httpx.codes.OK:
            raise self._refused(reply)
        return [card["id"] for card in reply.json()["data"]]

    def _info(self) -> Values:
        """What a Turnout says of itself; others: nothing."""
        try:
            reply = self._client.get("/server_info")
            found = reply.json() if reply.status_code == httpx.codes.OK else {}
        except (httpx.HTTPError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _lost(self, error: httpx.HTTPError) -> SideError:
        return SideError(f"{self.name}: {self._url} does not answer: {type(error).__name__}: {error}")

    def _refused(self, reply: httpx.Response) -> SideError:
        try:
            said = reply.json()
            message = said["error"]["message"] if isinstance(said.get("error"), dict) else said.get("message", said)
        except (ValueError, KeyError, AttributeError):
            message = reply.text
        hint = {401: "; give api_key=KEY", 404: "; a side needs /v1/completions"}.get(reply.status_code, "")
        return SideError(f"{self.name}: {reply.request.url} answers {reply.status_code}: {message!s:.400}{hint}")


def _tokens_in(event: Values) -> int:
    """How many tokens an event of a stream brings: by their ids, else one where there is text."""
    choices = event.get("choices") or [{}]
    ids = choices[0].get("token_ids")
    return len(ids) if ids is not None else int(bool(choices[0].get("text")))
