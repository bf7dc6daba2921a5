"""Faults of configurations, plugins and operation that other programs had: what was dropped in silence, or took all down."""

from __future__ import annotations

import itertools
import shlex
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml
from grids import every
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

import turnout.conf
import turnout.server.config
from turnout.compose import plugins
from turnout.compose.plugins import PluginError, Plugins
from turnout.core import hookimpl
from turnout.core.interfaces import Capabilities
from turnout.server.cli import plugins_cli
from turnout.server.cli.main import main
from turnout.server.cli.overrides import Usage, checked, objects, try_composing

PRESETS = sorted(path.stem for path in (Path(turnout.conf.__file__).parent / "experiment").glob("*.yaml"))


@pytest.fixture(scope="module")
def found() -> Plugins:
    return plugins.load()


@pytest.fixture(scope="module")
def composed(found: Plugins) -> Callable[..., DictConfig]:
    def make(*overrides: str, using: Plugins = found) -> DictConfig:
        with initialize_config_module("turnout.conf", version_base=None):
            return compose("serve", checked(list(overrides), using))

    return make


Compose = Callable[..., DictConfig]

# The command line


@every("key", ["rope", "zork.deep", "limits.max_seqs", "scheduler.zork", "server.portt"])
@pytest.mark.parametrize("plus", ["+", "++"])
def test_a_key_that_nothing_reads_is_refused_however_it_was_forced_in(
    composed: Compose, found: Plugins, key: str, plus: str
) -> None:
    with pytest.raises(Usage, match=rf"nothing reads {key.partition('.deep')[0]}\. "):
        objects(composed(f"{plus}{key}=3"), found)


def test_a_mapping_may_be_written_as_json(composed: Compose, found: Plugins) -> None:
    config: Any = objects(
        composed('limits={"max_num_seqs": 3, "max_model_len": null}', 'server={"cors_origins": ["a, b"]}'), found
    )
    assert (config.limits.max_num_seqs, config.limits.max_model_len) == (3, None)
    assert config.server.cors_origins == ["a, b"]


@pytest.mark.parametrize(
    "value",
    [{"a.b": 2}, {"a=b": "c=d, e"}, {"a b": [1, None, True, "it's"]}, {"a": {"b:c": {}}}, ["x", {"y": 0.5}]],
    ids=str,
)
def test_any_json_arrives_as_it_was_typed(found: Plugins, value: Any) -> None:
    import json

    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = checked([f"+option={json.dumps(value)}"], found)
    assert OverridesParser.create().parse_override(override).value() == value


@pytest.mark.parametrize("slot", list(plugins.SLOTS))
def test_the_remedy_of_a_slot_without_a_choice_works(composed: Compose, found: Plugins, slot: str) -> None:
    name = found.names(slot)[0]
    for form in (f"~{slot}", f"{slot}=", f"{slot}=a,b", f"{slot}=[a]", f"+{slot}={name}", f"++{slot}={name}"):
        with pytest.raises(Usage) as told:
            objects(composed(form), found)
        assert f"{slot}={name}" in str(told.value) or f"Installed here: {name}" in str(told.value)
    objects(composed(f"{slot}={name}"), found)


@pytest.mark.parametrize("arg", ["foo", '{"rope": 2}', "model"])
def test_what_is_no_override_is_told_so_in_our_own_words(found: Plugins, arg: str) -> None:
    with pytest.raises(Usage, match="is no override: write KEY=VALUE") as told:
        checked([arg], found)
    remedy = shlex.split(str(told.value).rpartition("such as ")[2])[0]
    assert checked([remedy], found)  # what it proposes can be read


@pytest.mark.parametrize("wrong", ["limits={a.b: 3}", "limits=3", "limits.max_seqs=3"])
def test_a_wrong_option_is_told_with_those_of_its_own_place(found: Plugins, wrong: str) -> None:
    with pytest.raises(Usage, match=r"There are: limits\.max_num_batched_tokens, limits\.max_num_seqs"):
        try_composing("serve", checked([wrong], found), found)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_wins_over_the_base_and_the_command_line_over_the_preset(composed: Compose, preset: str) -> None:
    text = (Path(turnout.conf.__file__).parent / "experiment" / f"{preset}.yaml").read_text()
    wanted = {group: values for group, values in yaml.safe_load(text).items() if group != "defaults"}
    plain, with_preset = composed(), composed(f"experiment={preset}")
    own = [f"{group}.{key}={value + 1}" for group, values in wanted.items() for key, value in values.items()]
    after, before = composed(f"experiment={preset}", *own), composed(*own, f"experiment={preset}")
    for group, values in wanted.items():
        for key, value in values.items():
            assert with_preset[group][key] == value != plain[group].get(key)
            assert after[group][key] == before[group][key] == value + 1


def test_the_effective_configuration_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "experiment=small_cache", "limits.max_num_seqs=3", "--cfg", "job"])
    printed: Any = OmegaConf.create(capsys.readouterr().out)
    assert (printed.blocks.num_blocks, printed.limits.max_num_seqs, printed.model) == (64, 3, "smollm2")


# Plugins


@dataclass
class Plain:
    def schedule(self, waiting: Any, running: Any, draft: Any) -> None: ...


@dataclass
class WithCallable(Plain):
    key: Callable[[], int] = int


@dataclass
class WithObject(Plain):
    thing: object = None


@dataclass
class WithSet(Plain):
    names: set[int] = field(default_factory=set)


@dataclass
class WithLiteral(Plain):
    kind: Literal["a", "b"] = "a"


@dataclass
class WithoutDefault(Plain):
    chunk: int


@dataclass
class Unmakeable(Plain):
    def __post_init__(self) -> None:
        raise RuntimeError("its own bug")


def offering(component: Any, name: Any = "odd", hook: str = "register_schedulers") -> types.ModuleType:
    module = types.ModuleType(f"module_of_{name}")

    def register(register: Any) -> None:
        register(name, component)

    setattr(module, hook, hookimpl(register, specname=hook))
    return module


@pytest.mark.parametrize("component", [WithCallable, WithObject, WithSet, WithLiteral])
@pytest.mark.parametrize("order", [("odd", "good"), ("good", "odd")])
def test_an_option_the_configuration_cannot_hold_makes_that_choice_unusable_and_no_other(
    component: type, order: tuple[str, ...]
) -> None:
    offers = {"odd": offering(component), "good": offering(Plain, "good")}
    collected = plugins.collect([], {name: offers[name] for name in order})
    assert collected.names("scheduler") == ["good"]
    with pytest.raises(PluginError, match=r"scheduler=odd of plugin 'odd'.*can't hold its option \w+: "):
        collected.get("scheduler", "odd")


@every("name", [5, None, "", "a/b", "a.b", "a b", "a,b", "a=b"])
def test_a_name_that_could_not_be_typed_is_refused_and_the_others_load(name: Any) -> None:
    collected = plugins.collect([], {"odd": offering(Plain, name), "good": offering(Plain, "good")})
    assert collected.names("scheduler") == ["good"]
    assert "is no name for a choice" in next(iter(collected.faults.values()))


def test_an_option_without_a_default_is_asked_for(composed: Compose) -> None:
    collected = plugins.collect([], {"odd": offering(WithoutDefault)} | own())
    with pytest.raises(Usage, match=r"scheduler\.chunk has no default: write scheduler\.chunk=VALUE"):
        objects(composed("scheduler=odd", using=collected), collected)


def test_a_component_that_cannot_be_made_names_its_package_and_the_way_around_it(composed: Compose) -> None:
    collected = plugins.collect([], {"odd": offering(Unmakeable)} | own())
    with pytest.raises(
        PluginError, match=r"scheduler=odd of .* cannot be made: RuntimeError: its own bug\. .*TURNOUT_BLOCK=odd"
    ):
        objects(composed("scheduler=odd", using=collected), collected)


def own() -> dict[str, object]:
    return {entry.name: entry.load() for entry in plugins.entry_points(group=plugins.interfaces.ENTRY_POINTS)}


@dataclass
class Backend:
    capabilities: ClassVar[Capabilities] = Capabilities(needs=("a_package_that_is_not_there.kernels", "json.nothing"))

    def allocate(self, spec: Any, dtype: Any, device: Any) -> Any: ...
    def plan(self, batch: Any, layer: Any, block_size: Any) -> Any: ...
    def run(self, q: Any, k: Any, v: Any, cache: Any, plan: Any, sinks: Any) -> Any: ...


@dataclass
class Complaining(Backend):
    capabilities: ClassVar[Capabilities] = Capabilities()

    @staticmethod
    def obstacle() -> str | None:
        raise RuntimeError("no device")


@dataclass
class Incapable(Backend):
    capabilities: ClassVar[Any] = None


def test_what_a_backend_lacks_or_trips_over_is_told_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offers = {
        kind.__name__.lower(): offering(kind, kind.__name__, "register_attention") for kind in (Backend, Complaining)
    }
    collected = plugins.collect([], offers | own())
    assert collected.get("attention", "Backend").obstacles() == [
        "a_package_that_is_not_there.kernels is not installed",
        "json.nothing is not installed",
    ]
    assert collected.get("attention", "Complaining").obstacles() == ["its obstacle() fails: RuntimeError: no device"]
    monkeypatch.setattr(plugins, "load", lambda: collected)
    assert plugins_cli.run(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "attention=Backend" in said and "attention=Complaining" in said


def test_a_backend_must_say_what_it_can() -> None:
    collected = plugins.collect([], {"incapable": offering(Incapable, "incapable", "register_attention")})
    with pytest.raises(PluginError, match=r"Incapable\.capabilities must be a Capabilities"):
        collected.get("attention", "incapable")


def test_a_wrapper_that_asked_to_be_first_is_outermost_whatever_the_registration_order() -> None:
    for order in itertools.permutations(["wrapper", "plain", "last"]):
        calls: list[str] = []

        def wrapper(step: Any, calls: list[str] = calls) -> Any:
            calls.append("wrapper begins")
            yield
            calls.append("wrapper ends")

        made = {
            "wrapper": hookimpl(wrapper, wrapper=True, tryfirst=True, specname="step_finished"),
            "plain": hookimpl(lambda calls=calls: calls.append("plain"), specname="step_finished"),
            "last": hookimpl(lambda calls=calls: calls.append("last"), trylast=True, specname="step_finished"),
        }
        modules = {name: types.ModuleType(name) for name in order}
        for name, module in modules.items():
            module.event = made[name]  # type: ignore[attr-defined]
        plugins.collect([], modules).manager.hook.step_finished(step=None, seconds=0.0, report=None)
        assert calls == ["wrapper begins", "plain", "last", "wrapper ends"], order


def test_registering_the_same_plugins_twice_in_a_process_is_harmless(composed: Compose, found: Plugins) -> None:
    again = plugins.collect([], own())
    assert {slot: again.names(slot) for slot in plugins.SLOTS} == {slot: found.names(slot) for slot in plugins.SLOTS}
    assert not again.faults
    assert objects(composed(), again) == objects(composed(), found)
