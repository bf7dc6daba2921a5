"""Faults other servers had in front of the engine: each request here once took a server down, or was misread in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from callers import BOTH, Api
from engines import LocalEngine, engine_on
from grids import every

from turnout.core import ModelError
from turnout.core.engine import Engine
from turnout.plugins.loader.model import Model
from turnout.server.api.app import create_app
from turnout.server.api.defaults import defaults_of
from turnout.server.cli import offline
from turnout.server.config import GenerateConfig, SamplingConfig, ServerConfig
from turnout.server.text.tokenizer import Text

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def engine(worded: Model) -> Engine:
    return engine_on(worded)


@pytest.fixture
def api(engine: Engine, http: Callable[[Engine], Api]) -> Api:
    return http(engine)


def idle(engine: Engine) -> bool:
    return not engine.busy and engine.stats.num_blocks_free == engine.stats.num_blocks


# Prompts without a token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "template", ["", "{{ messages[0]['content'] }}", "{% for m in messages if false %}x{% endfor %}"]
)
def test_messages_that_make_an_empty_prompt_are_a_400_and_the_next_is_served(
    api: Api, engine: Engine, text: Text, monkeypatch: pytest.MonkeyPatch, template: str, stream: bool
) -> None:
    monkeypatch.setattr(text._tokenizer, "chat_template", template)
    reply = api.chat("", stream=stream)
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "empty prompt" in reply.error["message"]
    assert api.post("/tokenize", {"messages": [{"role": "user", "content": ""}]}).good["count"] == 0
    monkeypatch.undo()
    assert api.chat(max_tokens=2, stream=stream).status == 200 and idle(engine)


@pytest.mark.parametrize("stream", [False, True])
@every("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]])
def test_an_empty_prompt_reaches_no_engine(api: Api, engine: Engine, prompt: Any, stream: bool) -> None:
    assert api.complete(prompt, stream=stream).status == 400
    assert api.complete(max_tokens=1).status == 200 and idle(engine)


# What is written down for the model


@pytest.mark.parametrize("generation", ["[]", "7", "null", '"x"'])
def test_a_generation_config_that_is_no_object_is_refused_by_name(
    text: Text, tmp_path: Path, generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: text._tokenizer)
    (tmp_path / "generation_config.json").write_text(generation)
    with pytest.raises(ModelError, match=r"generation_config\.json must hold a JSON object"):
        Text.load(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": [1]}, r"temperature must be a number, got \[1\]"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"min_p": 5}, "min_p must be between 0 and 1, got 5"),
    ],
)
def test_a_default_of_the_model_that_means_nothing_is_refused_with_the_way_out(
    text: Text, values: dict[str, Any], reason: str
) -> None:
    read = Text(text._tokenizer, values)
    with pytest.raises(ValueError, match=f"generation_config.json cannot be used: {reason}; .*server.defaults=none"):
        defaults_of(read, "server.defaults", "auto")
    assert defaults_of(read, "server.defaults", "none")["temperature"] == 1


def test_top_k_minus_1_and_top_p_0_mean_the_same_in_a_model_as_in_a_request(text: Text) -> None:
    read = Text(text._tokenizer, {"top_k": -1, "top_p": 0})
    values = defaults_of(read, "x", "auto")
    assert values["top_k"] == 0 and 0 < values["top_p"] < 1e-6


@pytest.mark.parametrize("eos", [[2, 10**6], [-1, 2], ["2", 2], [True, 2], [[5], 2], 2.0], ids=repr)
def test_an_end_token_the_model_cannot_make_ends_nothing_and_stops_no_request(
    text: Text, engine: Engine, http: Any, eos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Text(text._tokenizer, {"eos_token_id": eos})
    monkeypatch.setattr(text, "eos_ids", read.eos_ids)
    assert http(engine).complete(max_tokens=3).status == 200
    options = SamplingConfig(temperature=0, max_tokens=3)
    assert offline.sampling_of(options, defaults_of(read, "x", "auto"), read, engine.info, 5).stop_ids == {2}


class TestOneRuleForServerAndTerminal:
    """A model whose own default is a repetition penalty so strong that no token comes twice."""

    @pytest.fixture(autouse=True)
    def _penalized(self, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(text, "generation_defaults", {"temperature": 0, "repetition_penalty": 100.0})
        monkeypatch.setattr(text, "eos_ids", frozenset())

    @pytest.fixture
    def printed(self, text: Text, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., str]:
        def run(**sampling: Any) -> str:
            monkeypatch.setattr(offline, "open_engine", lambda config: (engine, text))
            options = SamplingConfig(**{"temperature": 0, "max_tokens": 40} | sampling)
            offline.generate(GenerateConfig(prompt="The sea is", sampling=options))
            return str(capsys.readouterr().out).removesuffix("\n")

        return run

    def test_the_models_own_values_hold_in_both_and_can_be_switched_off_in_both(
        self, printed: Callable[..., str], api: Api, engine: Engine, text: Text
    ) -> None:
        def served(app: Api, **fields: Any) -> str:
            reply = app.post("/v1/completions", {"prompt": "The sea is", "max_tokens": 40} | fields)
            return str(reply.good["choices"][0]["text"])

        own = served(api, temperature=0)
        assert own == served(api) == printed() != served(api, temperature=0, repetition_penalty=1)
        plain = app_with(engine, text, generation_config="none")
        without = served(plain, temperature=0)
        assert without == served(api, temperature=0, repetition_penalty=1) == printed(generation_config="none")

    def test_an_explicit_value_wins_in_both(self, printed: Callable[..., str], api: Api) -> None:
        reply = api.complete("The sea is", max_tokens=40, repetition_penalty=1, top_p=0, top_k=-1)
        assert reply.good["choices"][0]["text"] == printed(repetition_penalty=1, top_p=0, top_k=-1)


def app_with(engine: Engine, text: Text, **options: Any) -> Api:
    return Api(create_app(LocalEngine(engine), text, ServerConfig(**options)), engine.info.model)


def test_an_empty_key_is_refused_since_no_client_could_send_it() -> None:
    with pytest.raises(ValueError, match=r"server\.api_key must not be empty"):
        ServerConfig(api_key="")


@pytest.mark.parametrize("name", ["generation_config", "stop"])
def test_options_of_the_terminal_are_checked_as_those_of_a_request(name: str) -> None:
    with pytest.raises(ValueError, match=rf"sampling\.{name} must"):
        SamplingConfig(**{name: "some" if name == "generation_config" else [""]})


# What is not built yet, and what nobody knows

DEEP: dict[str, Any] = {"type": "object"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"inner": DEEP}}
SCHEMAS: list[Any] = [
    {},
    [],
    "text",
    5,
    True,
    {"type": "no-such-type"},
    {"type": ["string", 7]},
    {"type": "string", "format": "email"},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(a+)+$"},
    {"$ref": "#/definitions/missing"},
    {"$ref": "#"},
    {"enum": []},
    {"minimum": "x", "type": "integer"},
    DEEP,
]


@pytest.mark.parametrize("path", BOTH)
def test_no_schema_however_odd_takes_the_server_down(api: Api, path: str) -> None:
    for schema in SCHEMAS:
        for wrapped in ({"name": "x", "schema": schema}, schema):
            reply = api.ask(path, max_tokens=1, response_format={"type": "json_schema", "json_schema": wrapped})
            assert reply.status in (200, 400)  # never a 500
        for field in ("guided_json", "structured_outputs"):
            reply = api.ask(path, max_tokens=1, **{field: schema})  # {} and [] are the same as nothing
            assert reply.status in (200, 400)
        assert api.get("/health").status == 200
    assert api.ask(path, max_tokens=1).status == 200


def test_unknown_keys_inside_a_message_change_nothing(api: Api) -> None:
    plain = api.chat([USER], return_token_ids=True, max_tokens=3).good
    odd = USER | {"name": "ann", "cache_control": {"type": "ephemeral"}, "a_key_of_next_year": [1, {"x": None}]}
    reply = api.chat([odd], return_token_ids=True, max_tokens=3).good
    assert reply["prompt_token_ids"] == plain["prompt_token_ids"]
    assert reply["choices"][0]["message"] == plain["choices"][0]["message"]


@pytest.mark.parametrize("length", [255, 256, 257, 2000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_about_as_long_as_the_context_is_served_or_a_400_of_one_form(
    api: Api, engine: Engine, length: int, stream: bool
) -> None:
    assert engine.info.max_model_len == 256
    reply = api.complete([5] * length, max_tokens=1, stream=stream)
    assert reply.status == (200 if length == 255 else 400)
    if reply.status == 400:
        assert (reply.error["code"], reply.error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert idle(engine)
