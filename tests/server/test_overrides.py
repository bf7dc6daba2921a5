"""Overrides as people type them."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from turnout.compose import plugins
from turnout.compose.plugins import PluginError
from turnout.server.cli.keys import keys_of
from turnout.server.cli.overrides import Usage, checked, try_composing


@pytest.fixture(scope="module")
def found() -> plugins.Plugins:
    return plugins.load()


AWKWARD = [
    "/x/epoch=3-step=10",
    "/my models/a,b",
    "C:\\models\\x",
    "it's",
    "a'b\\'c",
    "#tag@v1",
    "{brace",
    "10",
    "[a",
    "3.10",
    "1e5",
    "12e4567",
    "yes",
    "use ${x}",
    "C:\\\\${x}\\",
    "a\nb",
    "'",
]
TEXTS = [("serve", "server.api_key"), ("chat", "system")]


@pytest.mark.parametrize("value", AWKWARD)
@pytest.mark.parametrize(("command", "key"), TEXTS)
def test_a_text_stays_as_it_was_typed(found: plugins.Plugins, command: str, key: str, value: str) -> None:
    overrides = checked([f"{key}={value}"], found)
    assert OmegaConf.select(try_composing(command, overrides, found), key) == value
    assert checked(overrides, found) == overrides, "quoted once"


@pytest.mark.parametrize("key", ["system", "server.api_key", "server.served_model_name", "record", "prompt"])
def test_null_is_no_text_where_there_may_be_none(found: plugins.Plugins, key: str) -> None:
    command = {"system": "chat", "prompt": "generate"}.get(key, "serve")
    assert OmegaConf.select(try_composing(command, checked([f"{key}=null"], found), found), key) is None


def test_every_option_that_takes_a_text_is_known_to(found: plugins.Plugins) -> None:
    for command in ("serve", "generate", "chat"):
        for key in keys_of(try_composing(command, [], found)):
            if key.kind in ("str", "str | None"):
                assert checked([f"{key.name}=1e5"], found) == [f"{key.name}='1e5'"]


def test_texts_in_a_list_stay_as_they_were_typed(found: plugins.Plugins) -> None:
    overrides = checked(["sampling.stop=[1e5, 3.10, no, it is]"], found)
    assert try_composing("generate", overrides, found).sampling.stop == ["1e5", "3.10", "no", "it is"]
    overrides = checked(["sampling.stop=['a, b', \"c\"]"], found)
    assert try_composing("generate", overrides, found).sampling.stop == ["a, b", "c"]
    assert try_composing("generate", checked(["sampling.stop=[]"], found), found).sampling.stop == []


def test_other_values_are_refused_with_the_quoting_that_works(found: plugins.Plugins) -> None:
    with pytest.raises(Usage, match=r"\"server.cors_origins='a=b='\""):
        checked(["server.cors_origins=a=b="], found)


@pytest.mark.parametrize("slot", list(plugins.SLOTS))
def test_an_unknown_choice_of_any_slot_lists_the_known_ones(found: plugins.Plugins, slot: str) -> None:
    with pytest.raises(PluginError, match=f"{slot}=nope: there is no such choice. Installed here: \\w+"):
        checked([f"{slot}=nope"], found)
    with pytest.raises(PluginError):
        checked(["-m", f"{slot}={found.names(slot)[0]},nope"], found)


@pytest.mark.parametrize("slot", list(plugins.SLOTS))
@pytest.mark.parametrize("value", ["", "a,b"])
def test_an_empty_choice_or_a_list_without_multirun_is_an_error(found: plugins.Plugins, slot: str, value: str) -> None:
    with pytest.raises(Usage):
        try_composing("serve", checked([f"{slot}={value}"], found), found)


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_a_wrong_key_lists_those_there_are(found: plugins.Plugins, command: str) -> None:
    with pytest.raises(Usage, match="There are: model, dtype"):
        try_composing(command, ["schedulr=fcfs"], found)
    with pytest.raises(Usage, match="limits.max_num_seqs"):
        try_composing(command, ["limits.max_seqs=4"], found)
    with pytest.raises(Usage, match="scheduler=chunked_prefill of turnout .* takes scheduler.chunk"):
        try_composing(command, ["scheduler=chunked_prefill", "scheduler.size=4"], found)
    with pytest.raises(Usage, match="could not be converted to Integer"):
        try_composing(command, ["limits.max_num_seqs=many"], found)


@pytest.mark.parametrize("preset", ["low_latency", "throughput", "small_cache"])
def test_presets_compose_and_later_overrides_win(found: plugins.Plugins, preset: str) -> None:
    try_composing("serve", [f"experiment={preset}", "limits.max_num_seqs=3"], found)


def test_enforce_eager_is_the_eager_mode_and_false_asks_for_nothing(found: plugins.Plugins) -> None:
    assert checked(["enforce_eager=True", "model=x"], found) == ["runner.mode=eager", "model=x"]
    assert checked(["enforce_eager=true", "runner.mode=eager"], found) == ["runner.mode=eager", "runner.mode=eager"]
    assert checked(["enforce_eager=false", "runner.mode=graphs"], found) == ["runner.mode=graphs"]
    composed = try_composing("serve", checked(["+enforce_eager=true"], found), found)
    assert composed.runner.mode == "eager"


def test_enforce_eager_beside_another_mode_is_an_error_that_names_both(found: plugins.Plugins) -> None:
    for args in (["runner.mode=graphs", "enforce_eager=true"], ["enforce_eager=true", "runner.mode='compile'"]):
        with pytest.raises(Usage, match="enforce_eager=true means runner.mode=eager, and runner.mode=.*drop one"):
            checked(args, found)
    with pytest.raises(Usage, match="enforce_eager takes true or false, got 'maybe'"):
        checked(["enforce_eager=maybe"], found)
