"""`turnout COMMAND --help` explains each key; commands, keys and values that are near a known one are named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import turnout.server.config  # noqa: F401  stores the schemas
from turnout.compose import plugins
from turnout.server.cli import main
from turnout.server.cli.keys import comments, did_you_mean, keys_of
from turnout.server.cli.overrides import try_composing


def call(*args: str) -> int:
    try:
        main.main(list(args))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_every_key_has_a_type_and_a_meaning(command: str) -> None:
    keys = list(keys_of(try_composing(command, [], plugins.load())))
    assert len(keys) > 20 and all(key.kind for key in keys)
    assert [key.name for key in keys if not key.about] == []


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "simulate", "bench", "tune", "ab", "quantize"])
def test_help_lists_the_keys_in_groups_without_the_banner_of_a_library(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(command, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"turnout {command} ") and "Hydra" not in out and "???" not in out
    if command == "serve":
        assert "  server.port=8000" in out and "\nscheduler=fcfs " in out and "or chunked_prefill" in out


def test_help_is_that_of_what_was_composed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("serve", "scheduler=chunked_prefill", "--port", "9000", "--help") == 0
    out = capsys.readouterr().out
    assert "scheduler.chunk=" in out and "server.port=9000" in out


@pytest.mark.parametrize(
    ("args", "near"),
    [
        (("serv",), "did you mean serve?"),
        (("simulat",), "did you mean simulate?"),
        (("serve", "server.prt=1"), "did you mean server.port?"),
        (("serve", "prot=1"), "did you mean server.port?"),
        (("serve", "schedulr=fcfs"), "did you mean scheduler?"),
        (("serve", "scheduler=chunked"), "did you mean chunked_prefill?"),
        (("serve", "limits.max_num_seq=1"), "did you mean limits.max_num_seqs?"),
    ],
)
def test_a_word_that_is_near_a_known_one_is_answered_with_it(
    args: tuple[str, ...], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*args) == 2
    assert near in capsys.readouterr().err


def test_a_word_that_is_near_nothing_gets_no_proposal() -> None:
    assert did_you_mean("xyzzy", ["server.port", "model"]) == ""


def test_comments_beside_fields_are_found_in_every_form_a_formatter_leaves_them() -> None:
    @dataclass
    class Base:
        one: int = 1  # of it
        two: str = "#"  # not this: #

    @dataclass
    class Mine(Base):
        three: float | None = None  # long
        one: int = 2  # anew
        four: bool = False

    assert comments(Mine) == {"one": "anew", "two": "not this: #", "three": "long", "four": ""}
