"""Command lines as people of other servers type them, and prompts that look like command lines."""

from __future__ import annotations

import pytest

import turnout.server.config  # noqa: F401  stores the schemas
from turnout.compose import plugins
from turnout.compose.plugins import Plugins
from turnout.server.cli.arguments import ALIASES, ordered, split_prompt
from turnout.server.cli.overrides import Usage


@pytest.fixture(scope="module")
def found() -> Plugins:
    return plugins.load()


def test_overrides_and_flags_may_stand_in_any_order(found: Plugins) -> None:
    given = ["--cfg", "job", "a=1", "-m", "b=2", "--config-dir=x"]
    assert ordered(given, "serve", found) == ["a=1", "b=2", "--cfg", "job", "-m", "--config-dir=x"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--port 9000", "server.port=9000"),
        ("--host=0.0.0.0", "server.host=0.0.0.0"),
        ("--model /models/x", "model=/models/x"),
        ("--max-model-len 128", "limits.max_model_len=128"),
        ("--gpu-memory-utilization 0.5", "limits.gpu_memory_utilization=0.5"),
        ("--served-model-name me", "server.served_model_name=me"),
        ("--server.port 9000", "server.port=9000"),
        ("--scheduler fair", "scheduler=fair"),
        ("--quantization awq", "quant=awq"),
        ("--attention-backend torch", "attention=torch"),
        ("--block-size 32", "blocks.block_size=32"),
        ("--no-enable-prefix-caching", "blocks.prefix_cache=false"),
        ("--enable-prefix-caching", "blocks.prefix_cache=true"),
        ("--log-requests", "server.log_requests=true"),
        ("--log-requests false", "server.log_requests=false"),
        ("--no-log-requests", "server.log_requests=false"),
        ("--enforce-eager", "enforce_eager=true"),
        ("--tensor-parallel-size 1", ""),
    ],
)
def test_a_conventional_flag_is_the_key_it_means(found: Plugins, words: str, meant: str) -> None:
    assert ordered(["scheduler=fcfs", *words.split()], "serve", found) == ["scheduler=fcfs", *meant.split()]


def test_every_alias_is_a_key_of_some_command(found: Plugins) -> None:
    for name, key in ALIASES.items():
        command = "generate" if key.startswith("sampling.") else "serve"
        flag = f"--{name.replace('_', '-')}"
        assert ordered([f"{flag}=1"], command, found) == [f"{key}=1"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--prt", "9000"], "no flag --prt; did you mean server.port"),
        (["--tensor-parallel-size", "2"], "runs on one device"),
        (["--trust-remote-code"], "is never run"),
        (["--port"], "--port needs a value: --port VALUE, or server.port=VALUE"),
        (["--", "text"], "takes no text"),
    ],
)
def test_what_a_flag_cannot_mean_is_answered_with_what_to_do(found: Plugins, words: list[str], complaint: str) -> None:
    with pytest.raises(Usage, match=complaint):
        ordered(words, "serve", found)


TEXTS = [
    "-1 + 1 =",
    "- one",
    "--help me with this",
    "-5",
    "~5 people",
    "model=2 means",
    "2+2=4, and 3+3=",
    "x=5; print(x)",
    "E=mc2",
    "+1",
    "~",
    "Hello",
    "model",
    "sampling",
    "{a: [1, 2",
    "'quoted'",
    "=",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("more", [[], ["sampling.max_tokens=3", "model=x"]], ids=["alone", "among others"])
def test_any_text_is_a_prompt(found: Plugins, text: str, more: list[str]) -> None:
    assert split_prompt([text, *more], found) == (more, text)
    assert split_prompt([*more, text], found) == (more, text)


@pytest.mark.parametrize("text", [*TEXTS, "--help", "-m", "--port", "model=x", "scheduler=fcfs", "--", "schedulr=fcfs"])
def test_behind_two_dashes_stands_a_prompt_whatever_it_looks_like(found: Plugins, text: str) -> None:
    assert split_prompt(["model=x", "--", text], found) == (["model=x"], text)


@pytest.mark.parametrize(
    "word",
    ["scheduler=fcfs", "sampling.max_tokens=3", "+experiment=x", "enforce_eager=true", "~limits", "prompt=The sea is",
     "model='/my models/x'", "sampling.stop=[a b]", "hydra.sweep.dir=x"],
)  # fmt: skip
def test_an_override_is_no_prompt(found: Plugins, word: str) -> None:
    assert split_prompt([word], found) == ([word], None)


def test_a_value_with_spaces_belongs_to_its_key_beside_a_prompt(found: Plugins) -> None:
    assert split_prompt(["model=/my models/x", "Hello"], found) == (["model=/my models/x"], "Hello")


def test_two_prompts_and_a_mistyped_key_are_refused(found: Plugins) -> None:
    with pytest.raises(Usage, match="one prompt, in one pair of quotes"):
        split_prompt(["The", "sea"], found)
    with pytest.raises(Usage, match=r"did you mean scheduler\?.* behind --"):
        split_prompt(["schedulr=fcfs"], found)


def test_a_flag_keeps_its_value_from_being_the_prompt(found: Plugins) -> None:
    given = ["--max-tokens", "5", "Hello", "--cfg", "job", "-m"]
    assert split_prompt(given, found) == (["sampling.max_tokens=5", "--cfg", "job", "-m"], "Hello")
