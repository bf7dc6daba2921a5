"""Several answers over HTTP: n, best_of, beam search."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from callers import BOTH, Api, until
from grids import every
from scripted import ScriptedEngine

from turnout.server.engine.messages import BeamSearch
from turnout.server.text.tokenizer import Text

SEA = "The sea is"


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def metric(api: Api, name: str) -> float:
    lines = api.get("/metrics").raw.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{re.escape(name)}(\{{| )", line))


class TestN:
    @pytest.mark.parametrize("path", BOTH)
    def test_the_others_are_children_of_each_prompts_first(self, api: Api, engine: ScriptedEngine, path: str) -> None:
        api.ask(path, n=3, max_tokens=2, seed=5, temperature=1)
        first, *others = engine.requests
        assert first.parent is None and {request.parent for request in others} == {first.id}
        assert [request.sampling.seed for request in engine.requests] == [5, 6, 7]
        assert all(request.tokens == first.tokens for request in others)

    def test_each_prompt_has_a_first_of_its_own(self, api: Api, engine: ScriptedEngine) -> None:
        api.complete([[5] * 5, [6] * 7], n=2, max_tokens=2)
        ids = [request.id for request in engine.requests]
        assert [request.parent for request in engine.requests] == [None, ids[0], None, ids[2]]

    def test_the_prompt_is_scored_once_and_every_answer_shows_it(self, api: Api, engine: ScriptedEngine) -> None:
        fields = {"n": 3, "max_tokens": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 2}
        choices = api.complete([5, 6, 7, 8], **fields).good["choices"]
        assert [request.sampling.prompt_logprobs for request in engine.requests] == [2, None, None]
        assert choices[0]["logprobs"] == choices[1]["logprobs"] == choices[2]["logprobs"]
        assert [len(choice["prompt_logprobs"]) for choice in choices] == [4, 4, 4]

    @pytest.mark.parametrize("path", BOTH)
    def test_a_first_that_fails_fails_the_request(self, api: Api, engine: ScriptedEngine, path: str) -> None:
        engine.fails_with = "its logits are NaN"
        assert api.ask(path, n=3).status == 500


class TestBestOf:
    @pytest.fixture(autouse=True)
    def _unequal(self, engine: ScriptedEngine) -> None:
        """Request number i makes i + 1 tokens, whose log-probabilities are likeliest in the middle."""
        engine.script = lambda request: [[1011], [1012, 1012], [1013] * 3, [1014] * 4][
            int(request.id.rpartition("-")[2]) % 4
        ]
        engine.logprob = {1011: -2.0, 1012: -0.9, 1013: -0.2, 1014: -1.5}.__getitem__

    @pytest.mark.parametrize("path", BOTH)
    def test_the_n_with_the_best_mean_log_probability_are_returned(self, api: Api, text: Text, path: str) -> None:
        reply = api.ask(path, best_of=4, n=2).good
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        assert [text_of(choice) for choice in reply["choices"]] == [text.decode([1013] * 3), text.decode([1012] * 2)]
        assert all(choice["logprobs"] is None for choice in reply["choices"])

    @pytest.mark.parametrize("path", BOTH)
    def test_usage_counts_what_was_made(self, api: Api, path: str) -> None:
        usage = api.ask(path, best_of=4, n=1).good["usage"]
        assert usage["completion_tokens"] == 1 + 2 + 3 + 4
        assert usage["total_tokens"] == usage["prompt_tokens"] + 10

    def test_each_prompt_has_its_best(self, api: Api, text: Text) -> None:
        choices = api.complete([[5], [6]], best_of=4, n=1).good["choices"]
        assert [(choice["index"], choice["text"]) for choice in choices] == [
            (0, text.decode([1013] * 3)),
            (1, text.decode([1013] * 3)),
        ]

    def test_log_probabilities_echo_and_ids_are_the_chosen_ones(self, api: Api, text: Text) -> None:
        fields = {"logprobs": 1, "echo": True, "return_token_ids": True, "prompt_logprobs": 1}
        (choice,) = api.complete([1012, 1012, 1012], best_of=4, n=1, **fields).good["choices"]
        assert choice["token_ids"] == [1013] * 3
        assert choice["logprobs"]["token_logprobs"] == [None, -0.9, -0.9, -0.2, -0.2, -0.2]
        assert len(choice["prompt_logprobs"]) == 3

    def test_a_chat_shows_the_chosen_ones_log_probabilities(self, api: Api) -> None:
        (choice,) = api.chat(best_of=4, n=1, logprobs=True, top_logprobs=2).good["choices"]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.2] * 3

    def test_tokens_behind_a_stop_string_do_not_count(self, api: Api, engine: ScriptedEngine, text: Text) -> None:
        stop = text.decode([1011])
        engine.script = lambda request: [1013, 1011, 1014, 1014] if request.parent is None else [1012, 1012, 1012, 1012]
        engine.per_output = 4
        (choice,) = api.complete(best_of=2, n=1, stop=stop, logprobs=0).good["choices"]
        assert choice["text"] == text.decode([1012] * 4), "(-0.2 - 2.0) / 2 is less than -0.9"
        engine.logprob = {1011: -0.2, 1012: -0.9, 1013: -0.2, 1014: -9.0}.__getitem__
        (choice,) = api.complete(best_of=2, n=1, stop=stop, logprobs=0).good["choices"]
        assert choice["text"] == text.decode([1013])

    def test_of_equals_the_first_is_returned(self, api: Api, engine: ScriptedEngine, text: Text) -> None:
        engine.script = lambda request: [1020 + int(request.id.rpartition("-")[2])]
        engine.logprob = lambda token: -1.0
        assert api.complete(best_of=3, n=1).good["choices"][0]["text"] == text.decode([1020])

    def test_without_tokens_the_first_are_returned(self, api: Api, engine: ScriptedEngine) -> None:
        assert len(api.complete(best_of=3, n=2, max_tokens=0, echo=True).good["choices"]) == 2

    @every("path", BOTH)
    @pytest.mark.parametrize(
        "fields",
        [{"best_of": 1, "n": 2}, {"best_of": 21}, {"best_of": 0}, {"best_of": 3, "n": 1, "stream": True}],
        ids=str,
    )
    def test_what_cannot_be_is_refused_by_name(self, api: Api, path: str, fields: dict[str, Any]) -> None:
        reply = api.ask(path, **fields)
        assert (reply.status, reply.error["param"]) == (400, "best_of")

    @pytest.mark.parametrize("path", BOTH)
    def test_when_all_are_returned_they_may_be_streamed(self, api: Api, path: str) -> None:
        plain, equal = (api.ask(path, n=3, stream=True, **more) for more in ({}, {"best_of": 3}))
        assert [equal.text(i) for i in range(3)] == [plain.text(i) for i in range(3)]

    def test_every_one_made_counts_in_the_metrics(self, api: Api) -> None:
        assert api.complete(best_of=4, n=1).status == 200
        assert metric(api, "turnout:requests_received_total") == metric(api, "vllm:request_success_total") == 4
        assert metric(api, "vllm:request_params_n_sum") == 1


@pytest.mark.parametrize("path", BOTH)
class TestBeamSearch:
    def test_the_engine_is_asked_once_and_its_answers_are_the_choices(
        self, api: Api, engine: ScriptedEngine, text: Text, path: str
    ) -> None:
        fields = {"length_penalty": 0.5, "early_stopping": "never", "max_tokens": 5}
        reply = api.ask(path, use_beam_search=True, n=2, best_of=4, **fields).good
        (asked,) = engine.asked
        assert isinstance(asked, BeamSearch)
        assert (asked.width, asked.length_penalty, asked.early_stopping) == (4, 0.5, "never")
        assert len(asked.answers) == 2 and asked.answers[0] == asked.id
        assert [text_of(choice) for choice in reply["choices"]] == [
            text.decode(engine.story[:5]),
            text.decode(engine.story[1:6]),
        ]
        assert [(choice["index"], choice["finish_reason"]) for choice in reply["choices"]] == [
            (0, "length"),
            (1, "length"),
        ]
        assert reply["usage"]["completion_tokens"] == 10, "those of the answers"

    def test_n_alone_is_the_width(self, api: Api, engine: ScriptedEngine, path: str) -> None:
        api.ask(path, use_beam_search=True, n=3)
        (asked,) = engine.asked
        assert isinstance(asked, BeamSearch) and (asked.width, len(asked.answers)) == (3, 3)
        assert (asked.length_penalty, asked.early_stopping) == (1.0, False)

    def test_an_end_token_is_no_text(self, api: Api, engine: ScriptedEngine, text: Text, path: str) -> None:
        stop = engine.story[3]
        for extra, shown in ({}, 3), ({"include_stop_str_in_output": True}, 4):
            (choice,) = api.ask(path, use_beam_search=True, stop_token_ids=[stop], max_tokens=9, **extra).good[
                "choices"
            ]
            assert text_of(choice) == text.decode(engine.story[:shown])
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)

    def test_the_engines_limits_are_passed_on(
        self, api_with: Callable[..., Api], engine: ScriptedEngine, path: str
    ) -> None:
        api = api_with(client_scheduling=True)
        api.ask(path, use_beam_search=True, max_tokens=9, min_tokens=4, ignore_eos=True, cache_salt="s", priority=2)
        (request,) = engine.requests
        assert (request.sampling.max_tokens, request.sampling.min_tokens, request.sampling.stop_ids) == (
            9,
            4,
            frozenset(),
        )
        assert (request.salt, request.priority) == ("s", 2)

    @pytest.mark.parametrize("fails_with", ["its logits are NaN", ValueError("it can never fit")])
    def test_a_search_that_fails_is_an_error_with_its_reason(
        self, api: Api, engine: ScriptedEngine, path: str, fails_with: Any
    ) -> None:
        engine.fails_with = fails_with
        reply = api.ask(path, use_beam_search=True, n=2)
        assert reply.status == (400 if isinstance(fails_with, ValueError) else 500)
        assert str(fails_with) in reply.error["message"]

    def test_it_counts_once_in_the_metrics(self, api: Api, path: str) -> None:
        assert api.ask(path, use_beam_search=True, n=3, max_tokens=4).status == 200
        assert metric(api, "turnout:requests_received_total") == metric(api, "vllm:request_success_total") == 1
        assert metric(api, "vllm:request_generation_tokens_sum") == 12
        assert metric(api, "vllm:time_to_first_token_seconds_count") == 1
        assert metric(api, "vllm:inter_token_latency_seconds_count") == 0
        assert metric(api, "vllm:request_time_per_output_token_seconds_count") == 0, "its tokens came at once"

    @every(
        "fields",
        [
            {"temperature": 0.7},
            {"stream": True},
            {"stop": "."},
            {"logit_bias": {"5": 1}},
            {"presence_penalty": 0.5},
            {"frequency_penalty": 0.5},
            {"repetition_penalty": 1.1},
        ],
    )
    def test_what_does_not_go_with_it_is_refused_with_what_to_do(
        self, api: Api, engine: ScriptedEngine, path: str, fields: dict[str, Any]
    ) -> None:
        reply = api.ask(path, use_beam_search=True, **fields)
        (name,) = fields
        assert (reply.status, reply.error["param"]) == (400, name)
        assert f"{name} does not go with use_beam_search: " in reply.error["message"]
        assert not engine.asked

    def test_what_asks_for_nothing_goes_with_it(self, api: Api, path: str) -> None:
        neutral = {"temperature": 0, "stream": False, "stop": [], "logit_bias": {}, "presence_penalty": 0}
        neutral |= {"frequency_penalty": 0.0, "repetition_penalty": 1, "top_p": 0.9, "seed": 3}
        assert api.ask(path, use_beam_search=True, **neutral).status == 200

    @pytest.mark.parametrize("fields", [{"length_penalty": 2}, {"early_stopping": True}], ids=str)
    def test_its_options_are_refused_without_it(self, api: Api, path: str, fields: dict[str, Any]) -> None:
        reply = api.ask(path, **fields)
        assert (reply.status, reply.error["param"]) == (400, *fields)
        assert "use_beam_search: true" in reply.error["message"]
        assert api.ask(path, length_penalty=1.0, early_stopping=False, use_beam_search=False).status == 200

    @every("fields", [{"early_stopping": "maybe"}, {"length_penalty": 11}, {"best_of": 1, "n": 2}, {"n": 0}])
    def test_values_out_of_range_are_refused(self, api: Api, path: str, fields: dict[str, Any]) -> None:
        reply = api.ask(path, use_beam_search=True, **fields)
        assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))


class TestBeamSearchShown:
    def test_log_probabilities_and_echo_are_those_of_each_answer(
        self, api: Api, engine: ScriptedEngine, text: Text
    ) -> None:
        fields = {"use_beam_search": True, "n": 2, "max_tokens": 3, "logprobs": 2, "echo": True, "prompt_logprobs": 1}
        choices = api.complete([1005, 1006, 1007, 1008], **fields).good["choices"]
        for place, choice in enumerate(choices):
            marks = choice["logprobs"]
            assert marks["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
            assert choice["text"] == text.decode([1005, 1006, 1007, 1008]) + text.decode(
                engine.story[place : place + 3]
            )
            assert "".join(marks["tokens"]) == choice["text"] and len(choice["prompt_logprobs"]) == 4

    def test_each_prompt_is_a_search(self, api: Api, engine: ScriptedEngine) -> None:
        engine.num_cached = 2
        reply = api.complete([[5] * 5, [6] * 7], use_beam_search=True, n=2, max_tokens=3).good
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert [asked.id for asked in engine.asked] == [request.id for request in engine.requests]
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (12, 12)
        assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}

    def test_a_chat_has_log_probabilities_in_its_own_form(self, api: Api, engine: ScriptedEngine) -> None:
        reply = api.chat(use_beam_search=True, n=2, max_tokens=3, logprobs=True, top_logprobs=1).good
        for choice in reply["choices"]:
            assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [1, 1, 1]

    def test_a_client_that_leaves_ends_its_search(self, url: str, engine: ScriptedEngine) -> None:
        engine.pace = 30
        body = {"prompt": SEA, "use_beam_search": True, "n": 2, "max_tokens": 5}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
        until(lambda: engine.left == [engine.requests[0].id])


def test_a_choice_that_a_stop_string_ends_is_aborted_while_the_other_goes_on(api: Api, engine: ScriptedEngine) -> None:
    fields: dict[str, Any] = {"n": 2, "seed": 7, "temperature": 1, "max_tokens": 30}
    first, other = (choice["text"] for choice in api.complete(**fields).good["choices"])
    stop = next(first[at : at + 4] for at in range(len(first)) if first[at : at + 4] not in other)
    engine.left.clear()
    engine.pace = 0.002
    choices = api.complete(**fields, stop=stop).good["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert engine.left == [engine.requests[-2].id]
