"""What is compared on: built in, from a file, from a recording."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from grids import every

from turnout.core.hooks import new_hooks
from turnout.core.types import Request, Sampling
from turnout.lab.ab.workload import FACTS, chosen, load
from turnout.plugins.scheduler import FCFS
from turnout.server.steplog.observe import recording
from turnout.server.text.tokenizer import Text
from turnout.testing import make_engine


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("short", 8, 128), ("mixed", 16, 1024), ("long_context", 512, 2000), ("attention", 8, 1024)],
)
def test_built_in_prompts_reach_from_the_shortest_to_the_longest(text: Text, name: str, least: int, most: int) -> None:
    items = load(name, text, 12, 2000, 0, 0)
    cut = [len(item.prompt) for item in items if item.answer is None]
    assert len(items) == 12 and min(cut) == least and max(cut) == most
    assert len({item.id for item in items}) == len({item.prompt for item in items}) == 12


def test_a_third_of_the_mixed_prompts_has_an_answer_to_check(text: Text) -> None:
    items = load("mixed", text, 12, 2000, 0, 0)
    assert [item.answer for item in items if item.answer] == [answer for _, answer in FACTS[:4]]
    assert items[0].text == text.decode(items[0].prompt) == FACTS[0][0]


def test_the_same_seed_makes_the_same_prompts_and_another_one_others(text: Text) -> None:
    assert (
        load("short", text, 6, 2000, 0, 1) == load("short", text, 6, 2000, 0, 1) != load("short", text, 6, 2000, 0, 2)
    )


def test_prompts_are_cut_to_the_room_there_is(text: Text) -> None:
    assert max(len(item.prompt) for item in load("long_context", text, 4, 732, 32, 0)) == 700
    with pytest.raises(ValueError, match="max_tokens=8 leaves no room for a prompt in a context of 8"):
        load("short", text, 4, 8, 8, 0)


def test_a_file_has_texts_or_ids_with_continuations_and_answers(text: Text, tmp_path: Path) -> None:
    lines = [
        {"prompt": "ab", "answer": "c"},
        {"id": 7, "prompt": [70, 71], "continuation": "xy"},
        {"prompt": "not read"},
    ]
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    one, two = load(str(path), text, 2, 100, 8, 0)
    assert (one.id, one.prompt, one.continuation, one.answer) == ("line 1", tuple(text.encode("ab")), (), "c")
    assert (two.id, two.prompt, two.continuation) == ("7", (70, 71), tuple(text.encode("xy")))
    assert two.text == text.decode([70, 71])


@every(
    ("line", "complaint"),
    [
        ('{"prompt": ""}', "line 1: it has no prompt"),
        ('{"question": "x"}', "line 1: it has no prompt"),
        ('{"prompt": 3}', "a prompt or continuation is a text or a list of token ids, got 3"),
        ('{"prompt": "x", "answer": 4}', "an answer is a text, got 4"),
        ("no json", "line 1: Expecting value"),
        ("[1]", "line 1"),
        ('{"prompt": "x", "id": 1}\n{"prompt": "y", "id": 1}', "two items have one id"),
        (
            '{"prompt": "0123456789", "continuation": "x"}',
            "line 1 needs room for 12 tokens, max_tokens=2 included, but the shortest context of a side has 10",
        ),
    ],
)
def test_a_file_that_is_wrong_is_said_where(text: Text, tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=complaint.replace("[", r"\[")):
        load(str(path), text, 4, 10, 2, 0)


def test_a_name_that_is_neither_is_refused_with_those_built_in(text: Text) -> None:
    with pytest.raises(ValueError, match="workload=nothing: there is no such file, and built in are short, mixed"):
        load("nothing", text, 4, 10, 2, 0)


def test_a_recording_gives_prompts_and_what_was_said_after_them(text: Text, tmp_path: Path) -> None:
    path, hooks = tmp_path / "day.jsonl", new_hooks()
    with recording(hooks, str(path), 2**20) as recorder:
        engine = make_engine(FCFS(), num_blocks=50, hooks=hooks)
        assert recorder is not None
        recorder.begin(engine.info)
        requests = [Request(f"r{i}", [70 + i, 71, 72], Sampling(0.0, max_tokens=3)) for i in range(2)]
        list(engine.generate(requests))
    found = [(item.id, item.prompt, item.continuation) for item in load(str(path), text, 10, 100, 8, 0)]
    assert found == [(r.id, tuple(r.tokens[:3]), tuple(r.tokens[3:])) for r in requests]


def test_where_attention_differs_contexts_are_long_unless_another_workload_is_asked_for() -> None:
    assert chosen("auto", True, "mixed") == "attention" and chosen("auto", False, "mixed") == "mixed"
    assert chosen("facts", True, "mixed") == "facts"
