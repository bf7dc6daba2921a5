"""What a request asks for reaches the engine: the request's own values, then the model's defaults, then OpenAI's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from callers import BOTH, Api
from grids import every
from scripted import ScriptedEngine

from turnout.core.types import Sampling
from turnout.server.api.app import create_app
from turnout.server.api.defaults import DEFAULTED
from turnout.server.config import ServerConfig
from turnout.server.text.tokenizer import Text

BARE = {"temperature": None}  # the helper sends temperature 0 otherwise


@pytest.fixture
def model_defaults(text: Text, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A model whose generation_config.json has values of its own."""
    values = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.3}
    monkeypatch.setattr(text, "generation_defaults", values)
    return values


def asked(engine: ScriptedEngine) -> Sampling:
    return engine.requests[-1].sampling


def test_without_anything_said_openais_defaults_hold(api: Api, engine: ScriptedEngine) -> None:
    api.complete(**BARE)
    sampling = asked(engine)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0, 0, 1)
    assert sampling.seed is None and sampling.logprobs is None and not sampling.logit_bias


def test_the_models_own_defaults_hold_where_the_request_says_nothing(
    api_with: Callable[..., Api], engine: ScriptedEngine, model_defaults: dict[str, float]
) -> None:
    api = api_with()
    api.complete(**BARE)
    assert {name: getattr(asked(engine), name) for name in model_defaults} == model_defaults
    api.complete(temperature=0.5)
    assert (asked(engine).temperature, asked(engine).top_p) == (0.5, 0.9)


def test_an_explicit_zero_wins_over_every_default(
    api_with: Callable[..., Api], engine: ScriptedEngine, model_defaults: dict[str, float]
) -> None:
    zeros = dict.fromkeys(("temperature", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed"), 0)
    api_with().complete(**zeros, top_p=0, repetition_penalty=1, max_tokens=0)
    sampling = asked(engine)
    assert all(getattr(sampling, name) == 0 for name in zeros)
    assert sampling.max_tokens == 0 and sampling.repetition_penalty == 1
    assert 0 < sampling.top_p < 1e-6  # the likeliest token alone


def test_the_models_defaults_can_be_switched_off(
    api_with: Callable[..., Api], engine: ScriptedEngine, model_defaults: dict[str, float]
) -> None:
    api_with(generation_config="none").complete(**BARE)
    assert {name: getattr(asked(engine), name) for name in DEFAULTED} == {
        name: getattr(Sampling(), name) for name in DEFAULTED
    }


def test_the_effective_defaults_are_shown_and_logged(
    api_with: Callable[..., Api], model_defaults: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "turnout.server"):
        shown = api_with().get("/server_info").good["sampling_defaults"]
    assert "temperature 0.7, top_p 0.9, top_k 40" in caplog.text
    assert shown == model_defaults | {"presence_penalty": 0, "frequency_penalty": 0}


def test_a_generation_config_out_of_range_stops_the_start(
    engine: ScriptedEngine, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "generation_defaults", {"temperature": -1})
    with pytest.raises(ValueError, match=r"generation_config.json.*temperature.*-1.*server.generation_config=none"):
        create_app(engine, text, ServerConfig())
    create_app(engine, text, ServerConfig(generation_config="none"))


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1.5, "seed": 7}, {"temperature": 1.5, "seed": 7}),
    ({"top_p": 0.5, "top_k": 3, "min_p": 0.2}, {"top_p": 0.5, "top_k": 3, "min_p": 0.2}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2, "frequency_penalty": 2}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"logit_bias": {"5": -100, "49151": 100}}, {"logit_bias": {5: -100, 49151: 100}}),
    ({"max_tokens": 3, "min_tokens": 2}, {"max_tokens": 3, "min_tokens": 2}),
    ({"max_tokens": 9, "max_completion_tokens": 3}, {"max_tokens": 3}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
    ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
]


@every(("fields", "expected"), FIELDS)
def test_fields_reach_the_engine(
    api: Api, engine: ScriptedEngine, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert api.complete(**fields).status == 200
    assert {name: getattr(asked(engine), name) for name in expected} == expected


def test_a_chat_asks_the_engine_for_the_same(
    api_with: Callable[..., Api], engine: ScriptedEngine, model_defaults: dict[str, float]
) -> None:
    api = api_with()
    for fields in (BARE, *(fields for fields, _ in FIELDS), {"stop_token_ids": [7], "ignore_eos": True}):
        wanted = []
        for path in BOTH:
            assert api.ask(path, **{"max_tokens": 5} | fields).status == 200
            wanted.append(asked(engine))
        assert wanted[0] == wanted[1], fields


def test_the_models_end_tokens_stop_it_unless_they_are_ignored(
    api: Api, engine: ScriptedEngine, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "eos_ids", frozenset({2, 100}))  # of the tokenizer and of generation_config.json
    api.complete(stop_token_ids=[7])
    assert asked(engine).stop_ids == {2, 100, 7}
    api.complete(stop_token_ids=[7], ignore_eos=True)
    assert asked(engine).stop_ids == {7}


def test_each_choice_has_the_seed_plus_its_index(api: Api, engine: ScriptedEngine) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 8}
    first, again = (api.complete(**fields).good["choices"] for _ in range(2))
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9] * 2
    assert first == again
    assert len({str(choice.get("text") or choice.get("message")) for choice in first}) == 3


def test_a_seed_at_the_end_of_its_range_goes_round(api: Api, engine: ScriptedEngine) -> None:
    api.complete(n=2, seed=2**64 - 1)
    assert [request.sampling.seed for request in engine.requests] == [2**64 - 1, 0]


def test_the_seeds_of_a_prompt_do_not_depend_on_the_prompts_beside_it(api: Api, engine: ScriptedEngine) -> None:
    api.complete(["a", "b"], n=2, seed=5)
    assert [request.sampling.seed for request in engine.requests] == [5, 6, 5, 6]


def test_policies_see_priority_salt_and_labels(api_with: Callable[..., Api], engine: ScriptedEngine) -> None:
    reply = api_with(client_scheduling=True).complete(
        n=2, priority=-3, cache_salt="abc", user="ann", service_tier="flex"
    )
    for request in engine.requests:
        assert (request.priority, request.salt) == (-3, "abc")
        assert request.labels == {"user": "ann", "service_tier": "flex", "request": reply.headers["x-request-id"]}


class TestLimits:
    """The context is 2048 tokens in the scripted engine."""

    def test_a_completion_makes_16_tokens_and_a_chat_fills_the_context(self, api: Api, engine: ScriptedEngine) -> None:
        api.complete()
        assert asked(engine).max_tokens == 16
        api.chat(stop_token_ids=[engine.story[3]])
        assert asked(engine).max_tokens == 2048 - engine.requests[-1].num_prompt

    def test_a_completion_without_a_limit_fits_itself_into_the_rest(self, api: Api, engine: ScriptedEngine) -> None:
        api.complete([5] * 2047)
        assert asked(engine).max_tokens == 1

    @every(("num_prompt", "limit"), [(2048, None), (2049, None), (9000, None), (19, 2040), (2048, 1)])
    @pytest.mark.parametrize("stream", [False, True])
    def test_what_does_not_fit_is_a_400_that_names_the_numbers(
        self, api: Api, num_prompt: int, limit: int | None, stream: bool
    ) -> None:
        reply = api.complete([5] * num_prompt, max_tokens=limit, stream=stream)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        for number in (2048, num_prompt, num_prompt + (limit or 1)):
            assert str(number) in reply.error["message"]

    def test_a_prompt_as_long_as_the_context_can_be_scored(self, api: Api) -> None:
        assert api.complete([5] * 2048, max_tokens=0).good["usage"]["completion_tokens"] == 0

    def test_a_chat_beyond_the_context_is_the_same_400(self, api: Api) -> None:
        for fields in ({"max_tokens": 2048}, {"messages": "sea " * 3000}):
            reply = api.chat(**fields)
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
            assert "2048" in reply.error["message"]

    def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenized(self, api: Api) -> None:
        reply = api.complete("sea " * 2_000_000)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "2048" in reply.error["message"] and "8000000 characters" in reply.error["message"]

    def test_a_small_cache_is_the_limit_and_is_named(self, text: Text) -> None:
        engine = ScriptedEngine(text, capacity=64, num_blocks=4)
        api = Api(create_app(engine, text, ServerConfig()), engine.info.model)
        reply = api.complete([5] * 60, max_tokens=6)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "64" in reply.error["message"] and "2048" in reply.error["message"]
        assert api.complete([5] * 60, max_tokens=5).status == 200  # the last token needs no room in the cache

    def test_too_many_answers_in_one_request_are_refused(self, api: Api) -> None:
        assert api.complete(["a"] * 100, n=100).error["param"] == "n"
        assert api.complete(["a"] * 5000).error["param"] == "prompt"
