"""Overrides as people type them."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from turnout.core import plugins
from turnout.core.plugins import PluginError
from turnout.server.cli.overrides import Usage, checked, quoted, try_composing


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
    "null",
    "[a",
]


@pytest.mark.parametrize("value", AWKWARD)
def test_a_model_path_reaches_the_configuration_as_it_was_typed(found: plugins.Plugins, value: str) -> None:
    (override,) = checked([f"model={value}"], found)
    assert str(OverridesParser.create().parse_override(override).value()).replace("None", "null") == value
    assert str(OverridesParser.create().parse_override(f"model={quoted(value)}").value()) == value


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
