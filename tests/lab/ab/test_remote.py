"""Servers as sides: a Turnout, one that takes no field beyond the API's, and ones that can't be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
from callers import live
from engines import LocalEngine, engine_on

from turnout.compose import plugins
from turnout.core.engine import Engine
from turnout.lab.ab.remote import ServerSide
from turnout.lab.compare.run import Settings, compare
from turnout.lab.compare.sides import EngineSide, Item, SideError
from turnout.lab.compare.speed import race
from turnout.lab.compare.verdict import Verdict
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.quant.none import Unquantized
from turnout.server.api.app import create_app
from turnout.server.config import ServerConfig
from turnout.server.text.tokenizer import Text

SETTINGS = Settings(max_tokens=6, num_top=8)
EXTENSIONS = {"return_tokens_as_token_ids", "return_token_ids", "ignore_eos", "add_special_tokens", "cache_salt"}
Make = Callable[..., ServerSide]
Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def model(tiny: str) -> Model:
    return load(inspect(tiny, "float32", "cpu"), Unquantized())


def engine(model: Model) -> Engine:
    made = engine_on(model, num_blocks=200)
    made.info = replace(made.info, dtype="float32", versions=plugins.versions())
    return made


@pytest.fixture(scope="module")
def url(model: Model, text: Text) -> Iterator[str]:
    with live(create_app(LocalEngine(engine(model)), text, ServerConfig(api_key="key"))) as address:
        yield address


@pytest.fixture(scope="module")
def items(text: Text) -> list[Item]:
    return [Item(str(i), tuple(text.encode(f"{i} is a number that is not {i + 1}"))) for i in range(21)]


class Between(httpx.BaseTransport):
    """Passes requests on, as a server that is stricter or says less."""

    def __init__(self, *, refuses: set[str] = frozenset(), change: Change = lambda body: body, hides: str = "") -> None:  # type: ignore[assignment]
        self._refuses, self._change, self._hides, self._there = refuses, change, hides, httpx.HTTPTransport()

    def close(self) -> None:
        self._there.close()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read() or b"{}")
        if strange := body.keys() & self._refuses:
            return httpx.Response(400, json={"error": {"message": f"Unrecognized request argument: {min(strange)}"}})
        if self._hides and request.url.path == self._hides:
            return httpx.Response(404, json={"detail": "Not Found"})
        reply = self._there.handle_request(request)
        if body.get("stream") or request.url.path != "/v1/completions":
            return reply
        return httpx.Response(reply.status_code, json=self._change(json.loads(reply.read())))


@pytest.fixture
def side(url: str, text: Text) -> Iterator[Make]:
    """Makes sides on the server, or on another address."""
    with ExitStack() as stack:

        def make(address: str = url, **options: Any) -> ServerSide:
            made = ServerSide("server", address, text, **{"api_key": "key"} | options)
            stack.callback(made.close)
            return made

        yield make


def test_a_turnout_is_equivalent_to_the_same_engine_here_to_the_last_sampled_token(
    side: Make, model: Model, items: list[Item]
) -> None:
    there = side()
    [found] = compare(EngineSide("here", engine(model)), [there], items, SETTINGS)
    assert found.verdict is Verdict.EQUIVALENT
    assert there.dtype == "float32" and there.draws == "turnout"
    assert str(there.origin["fingerprint"]).startswith("fp_") and there.origin["kind"] == "server"
    assert {f.measure for f in found.findings} == {"kl", "flips", "greedy", "sampled", "surprise"}
    assert found.table.kl.max() < 1e-10 and found.table.overlap.min() > 0.8


def test_a_server_that_takes_the_apis_fields_only_and_names_tokens_by_text_is_compared_too(
    side: Make, model: Model, items: list[Item]
) -> None:
    strict = side(transport=Between(refuses=EXTENSIONS, hides="/server_info"), dtype="float32")
    assert strict.draws == ""
    [found] = compare(EngineSide("here", engine(model)), [strict], items[:8], SETTINGS)
    assert found.table.kl.max() < 1e-10 and not found.table.flip.any()
    assert {f.measure for f in found.findings} == {"kl", "flips", "greedy"}


def test_a_server_is_timed_token_by_token(side: Make, items: list[Item]) -> None:
    there = side()
    [found] = race(there, [there], items[:3], 5, rounds=2)
    speed = found.rounds[0][0]
    assert (speed.num_tokens, len(speed.ttft), len(speed.itl)) == (15, 3, 12)
    assert speed.seconds > 0 and min(speed.itl) >= 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"api_key": "wrong"}, "answers 401"),
        ({"model": "another"}, 'there is no model "another"'),
        ({"transport": Between(hides="/v1/completions")}, "a side needs /v1/completions"),
    ],
)
def test_a_server_that_refuses_is_quoted(side: Make, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SideError, match=complaint):
        side(**options)


def without_echo(body: dict[str, Any]) -> dict[str, Any]:
    marks = body["choices"][0]["logprobs"]
    body["choices"][0]["logprobs"] = {name: values[-1:] for name, values in marks.items()}
    return body


def other_tokens(body: dict[str, Any]) -> dict[str, Any]:
    marks = body["choices"][0]["logprobs"]
    marks["tokens"] = [f"token_id:{7 + i}" for i in range(len(marks["tokens"]))]
    return body


@pytest.mark.parametrize(
    ("change", "complaint"),
    [(without_echo, "has to score a prompt given as token ids"), (other_tokens, "its tokenizer is another one")],
)
def test_a_server_that_can_not_be_forced_is_told_from_the_first_request(
    side: Make, change: Change, complaint: str
) -> None:
    with pytest.raises(SideError, match=complaint):
        side(transport=Between(change=change))


def test_a_server_that_is_gone_is_said(side: Make) -> None:
    with pytest.raises(SideError, match=r"http://127\.0\.0\.1:9 does not answer: ConnectError"):
        side("http://127.0.0.1:9")
