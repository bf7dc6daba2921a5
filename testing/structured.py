"""The rules of structured output. They know no library.

class TestMine(StructuredContract):
    make = Mine
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any
from unittest import SkipTest

from turnout.core.structured import Structured
from turnout.core.types import StructuredSpec
from turnout.testing.structured_scene import BROKEN, END, Scene, keywords, refused

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[ab1-9é]{0,4}$"},
        "tags": {"type": "array", "items": {"enum": ["ab", "yes"]}, "maxItems": 2},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
EXPRESSION = "(yes|no), [ab]{2,4}(12)?"
TAG: dict[str, Any] = {
    "structures": [{"begin": "<call>f(", "schema": {"type": "boolean"}, "end": ")"}],
    "triggers": ["<call>"],
}


class StructuredContract:
    """What every component of the slot keeps. `make` builds one."""

    make: Callable[[], Structured]

    @cached_property
    def scene(self) -> Scene:
        """Raises SkipTest for a component that refuses every form."""
        scene = Scene(self.make())
        if refused(lambda: scene.compile("regex", "a")) and refused(lambda: scene.compile("json_object")):
            raise SkipTest("it refuses every form")
        return scene

    def test_exactly_the_tokens_whose_bits_are_set_may_follow(self) -> None:
        """But where the text goes on in one way only, the shorter tokens that begin it may have none."""
        for kind, value in (("regex", EXPRESSION), ("json_schema", PERSON)):
            grammar = self.scene.compile(kind, value)
            _, taken = self.scene.walk(grammar, seed=1, most=8)
            state = grammar.start()
            for token in taken:
                allowed = set(self.scene.allowed(state))
                for other in range(self.scene.num_known):
                    took = state.copy().advance([other]) == 1
                    name, text = self.scene.text([other]), self.scene.text(taken)
                    longer = {each for each in allowed if self.scene.text([each]).startswith(name)}
                    assert took or other not in allowed, f"{name!r} in {text!r} is not taken, and its bit is set"
                    assert not took or longer, f"{name!r} in {text!r} is taken, and its bit is not set"
                assert max(allowed) < self.scene.num_known, "an id that the tokenizer does not know may follow"
                state.advance([token])

    def test_an_answer_that_ended_has_the_form(self) -> None:
        for seed in range(20):
            state, taken = self.scene.walk(self.scene.compile("regex", EXPRESSION), seed)
            assert state.accepting and re.fullmatch(EXPRESSION, self.scene.text(taken)), f"{self.scene.text(taken)!r}"
            state, taken = self.scene.walk(self.scene.compile("json_schema", PERSON), seed, most=200)
            found = json.loads(self.scene.text(taken))
            assert set(found) <= {*PERSON["properties"]} and {"name", "tags"} <= set(found), f"{found}"
            assert len(found["name"]) <= 4 and set(found["tags"]) <= {"ab", "yes"}, f"{found}"

    def test_it_accepts_and_finishes_where_the_answer_may_and_must_end(self) -> None:
        state, scene = self.scene.compile("regex", "ab(12)?").start(), self.scene
        for text, accepting, finished in (
            ("a", False, False),
            ("b", True, False),
            ("1", False, False),
            ("2", True, True),
        ):
            assert state.advance(scene.ids(text)) == 1
            assert (state.accepting, state.finished) == (accepting, finished), f"after {text!r}"

    def test_an_end_token_never_may_follow(self) -> None:
        for grammar in (self.scene.compile("regex", "a*"), self.scene.compile("json_object")):
            state = grammar.start()
            for text in ("", "aa", "{", "}"):
                state.advance(self.scene.ids(text))
                assert END not in self.scene.allowed(state) and state.advance([END]) == 0

    def test_tokens_are_taken_up_to_the_first_that_may_not_follow(self) -> None:
        state, ids = self.scene.compile("regex", "abab").start(), self.scene.ids
        assert state.advance([*ids("a"), *ids("b"), *ids("x"), *ids("a")]) == 2, "not two of a, b, x, a were taken"
        assert state.advance(ids("ab")) == 1 and state.finished, "what may not follow changed the state"

    def test_what_is_rolled_back_was_never_taken(self) -> None:
        for kind, value in (("regex", EXPRESSION), ("json_schema", PERSON)):
            grammar = self.scene.compile(kind, value)
            final, taken = self.scene.walk(grammar, seed=3)
            for back in range(1, len(taken) + 1):
                state, plain = final.copy(), grammar.start()
                state.rollback(back)
                plain.advance(taken[: len(taken) - back])
                assert self.scene.allowed(state) == self.scene.allowed(plain), f"{back} tokens back"
                assert (state.accepting, state.finished) == (plain.accepting, plain.finished), f"{back} tokens back"
                assert state.advance(taken[len(taken) - back :]) == back, "what was rolled back may not follow again"

    def test_a_copy_goes_its_own_way(self) -> None:
        grammar, ids = self.scene.compile("regex", "a(ab|12)"), self.scene.ids
        first = grammar.start()
        first.advance(ids("a"))
        second = first.copy()
        assert first.advance(ids("12")) == 1 and first.finished
        assert second.advance(ids("ab")) == 1 and second.finished
        assert grammar.start().advance(ids("a")) == 1, "an answer changed the form itself"

    def test_forms_do_not_get_in_each_others_way(self) -> None:
        one, two = self.scene.compile("regex", "a+").start(), self.scene.compile("regex", "b+").start()
        assert self.scene.allowed(one) != self.scene.allowed(two)
        assert one.advance(self.scene.ids("b")) == 0 and two.advance(self.scene.ids("b")) == 1

    def test_nothing_a_schema_says_is_dropped(self) -> None:
        for schema, right, wrong in keywords():
            try:
                grammar = self.scene.compile("json_schema", schema)
            except ValueError:
                continue  # refused, not dropped
            assert self.scene.takes(grammar, right), f"{schema}: {right} can't be said"
            assert not self.scene.takes(grammar, wrong), f"{schema}: {wrong} can be said"

    def test_what_is_wrong_is_refused_by_a_value_error_that_names_the_place(self) -> None:
        for kind, value, named in BROKEN:
            why = refused(lambda kind=kind, value=value: self.scene.compile(kind, value))  # type: ignore[misc]
            assert why is not None, f"{kind} {value!r} compiles"
            assert named in why, f"{kind} {value!r}: {named!r} is not named in {why!r}"

    def test_a_choice_is_one_of_its_texts(self) -> None:
        texts = ["é", 'b"\\', "line\nline", "abab"]
        grammar = self.scene.compile("choice", texts)
        assert all(self.scene.takes(grammar, text) for text in texts)
        assert not self.scene.takes(grammar, "ab") and not self.scene.takes(grammar, "")

    def test_grammars_are_read_in_lark_and_in_gbnf(self) -> None:
        for grammar in ('start: "yes" | "no" "12"', 'root ::= "yes" | "no" "12"'):
            made = self.scene.compile("grammar", grammar)
            assert [self.scene.takes(made, text) for text in ("yes", "no12", "no")] == [True, True, False], grammar

    def test_json_is_compact_unless_asked_otherwise(self) -> None:
        for whitespace, spaced in (("compact", False), ("any", True)):
            grammar = self.scene.compile("json_schema", PERSON, whitespace=whitespace)
            assert self.scene.takes(grammar, '{"name":"a","tags":["ab","yes"]}'), whitespace
            assert self.scene.takes(grammar, '{"name": "a", "tags": ["ab", "yes"]}') == spaced, whitespace

    def test_the_form_begins_after_the_reasoning(self) -> None:
        for after in ("</think>", "|yes|"):  # an added token, and text that is several
            grammar, scene = self.scene.compile("regex", "ab|12", after=after), self.scene
            state = grammar.start()
            thought = scene.ids(f"no {after[:-1]} 12")
            assert state.advance(thought) == len(thought) and not state.accepting, "reasoning is not free"
            assert END not in scene.allowed(state), "the answer may end before it began"
            ids = scene.ids(after)
            assert state.advance(ids) == len(ids) and state.advance(scene.ids("x")) == 0, "the form did not begin"
            state.rollback(1)
            assert state.advance(scene.ids("x")) == 1 and not state.accepting, (
                "the end of the reasoning was not taken back"
            )
            state.rollback(1)
            assert state.advance(ids[-1:]) == 1 and state.advance(scene.ids("ab")) == 1 and state.finished

    def test_a_structural_tag_holds_its_structure(self) -> None:
        asked = {**TAG, "at_least_one": True, "stop_after_first": True}
        grammar = self.scene.compile("structural_tag", asked)
        assert self.scene.takes(grammar, "<call>f(true)")
        assert not self.scene.takes(grammar, "<call>f(12)") and not self.scene.takes(grammar, "no")
        several = self.scene.compile("structural_tag", {**TAG, "at_least_one": True})
        assert self.scene.takes(several, "<call>f(true)\n<call>f(false)")

    def test_text_around_a_structural_tag_is_free(self) -> None:
        if why := refused(lambda: self.scene.compile("structural_tag", TAG)):
            raise SkipTest(why)
        grammar = self.scene.compile("structural_tag", TAG)
        assert self.scene.takes(grammar, "no call") and self.scene.takes(grammar, "ab <call>f(true) 12")
        assert not self.scene.takes(grammar, "ab <call>g(true)") and not self.scene.takes(grammar, "ab <call>f(12)")

    def test_several_threads_may_compile(self) -> None:
        specs = [StructuredSpec("regex", f"a{{{number}}}b") for number in range(1, 9)]
        self.scene  # noqa: B018  prepared by one
        with ThreadPoolExecutor(4) as pool:
            grammars = list(pool.map(self.scene.structured.compile, specs))
        for number, grammar in enumerate(grammars, 1):
            assert self.scene.takes(grammar, "a" * number + "b")
