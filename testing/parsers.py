"""The rules of tool parsers and reasoning parsers as test classes. They know no plugin and no server.

    class TestMine(ToolParserContract):
        make = Mine

A parser's calls are written by its own `form`, so a parser without one keeps fewer rules.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import SkipTest

from turnout.core.parsers import BrokenCall, CallDelta, CallForm, Thought

PROSE = "The sea is wide.\n\nIt has no { end } [of course], says <b>he</b>: 3 < 4 \U0001f30a.\n"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    }
    for name in ("weather", "get-tides")
]
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("weather", {"city": "Paris"})],
    [
        (
            "weather",
            {"city": 'Sa\u0303o "Paulo"\\\n\u4e16\u754c \U0001f600', "days": 3, "exact": True, "tags": ["a, b", "}])"]},
        )
    ],
    [("weather", {})],
    [("weather", {"city": "Oslo"}), ("weather", {"days": -2, "exact": False}), ("weather", {})],
]


def written(form: CallForm, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls as a model that knows the form writes them."""
    texts = []
    for index, (name, arguments) in enumerate(calls):
        begin = form.begin.replace("{name}", name).replace("{index}", str(index))
        texts.append(begin + _arguments(form, arguments) + form.end)
    return form.before + form.between.join(texts) + form.after


def _arguments(form: CallForm, arguments: Mapping[str, Any]) -> str:
    own = form.parameters
    if own is None:
        return json.dumps(arguments)
    pieces = []
    for key, value in arguments.items():
        pieces.append(own.begin.replace("{key}", key) + _value(value, own.quote) + own.end)
    return own.between.join(pieces)


def _value(value: object, quote: str | None) -> str:
    if isinstance(value, str) and quote is not None:
        return quote + value + quote
    if isinstance(value, list) and quote:
        return "[" + ",".join(_value(item, quote) for item in value) + "]"
    return json.dumps(value)


class Gathered:
    """What a tool stream made of a text given in pieces. `steps`: the events of each."""

    def __init__(self, parser: Any, pieces: Sequence[str], cut: bool = False) -> None:
        stream = parser.start(TOOLS)
        self.events = [event for piece in pieces for event in stream.feed(piece, ())]
        self.events += stream.finish(cut)
        self.text, self.names, self.ids = "", list[str](), list[str | None]()
        self.arguments: list[str] = []
        self.broken: list[int | None] = []
        for event in self.events:
            self._take(event)

    def _take(self, event: str | CallDelta | BrokenCall) -> None:
        if isinstance(event, str):
            self.text += event
        elif isinstance(event, BrokenCall):
            self.text += event.text
            self.broken.append(event.index)
        elif event.name is not None:
            assert event.index == len(self.names), f"call {len(self.names)} has the index {event.index}"
            assert not event.arguments, f"the first delta of a call has arguments: {event}"
            self.names.append(event.name)
            self.ids.append(event.id)
            self.arguments.append("")
        else:
            assert event.index == len(self.names) - 1, f"arguments of a call that is over or was never opened: {event}"
            assert event.arguments and event.id is None, f"a delta without arguments, or with a second id: {event}"
            self.arguments[-1] += event.arguments

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(given)) for name, given in zip(self.names, self.arguments, strict=True)]

    @property
    def said(self) -> tuple[object, ...]:
        """All of it, less ids, which may be made by chance."""
        return self.text, self.names, self.arguments, self.broken


def cuts(text: str, dice: random.Random) -> Iterator[list[str]]:
    """The text in two pieces in every way, character by character, and in random pieces."""
    yield from ([text[:place], text[place:]] for place in range(1, len(text)))
    yield list(text)
    for _ in range(5):
        places = sorted(dice.sample(range(len(text) + 1), min(len(text), 4)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


class ToolParserContract:
    """What every tool parser keeps. `make` builds one, with any options; `templates` are chat templates it fits."""

    make: Callable[[], Any]
    templates: Sequence[str] = ("",)

    def forms(self) -> list[CallForm]:
        """Raises SkipTest where it has none."""
        found = [form for form in (self.make().form(template) for template in self.templates) if form is not None]
        if not found:
            raise SkipTest("it has no form to write calls with")
        return found

    def test_text_without_a_call_is_content_however_it_comes(self) -> None:
        for pieces in cuts(PROSE, random.Random(0)):
            found = Gathered(self.make(), pieces)
            assert (found.text, found.names, found.broken) == (PROSE, [], []), f"{pieces} became {found.events}"

    def test_calls_in_its_own_form_are_read(self) -> None:
        for form in self.forms():
            for calls in CALLS:
                calls = calls[: form.most]
                found = Gathered(self.make(), [written(form, calls)])
                assert not found.text and not found.broken, f"{found.text!r} is left of {written(form, calls)!r}"
                assert found.calls == calls, f"{written(form, calls)!r} became {found.calls}"

    def test_content_around_calls_is_kept(self) -> None:
        for form in self.forms():
            for before in ("", "Let me see.\n"):
                found = Gathered(self.make(), [before + written(form, CALLS[0])])
                if before and not found.names:  # calls stand at an answer's start only
                    assert found.text == before + written(form, CALLS[0])
                    continue
                assert found.text.strip() == before.strip() and found.calls == CALLS[0]

    def test_what_it_gives_does_not_depend_on_how_the_text_is_cut(self) -> None:
        for form in self.forms():
            for calls in CALLS:
                text = written(form, calls[: form.most])
                whole = Gathered(self.make(), [text])
                for pieces in cuts(text, random.Random(1)):
                    assert Gathered(self.make(), pieces).said == whole.said, f"{pieces} is read in another way"

    def test_no_piece_of_arguments_ends_inside_an_escape(self) -> None:
        for form in self.forms():
            text = written(form, CALLS[1])
            for event in Gathered(self.make(), list(text)).events:
                if isinstance(event, CallDelta):
                    piece = event.arguments.replace("\\\\", "")
                    assert not piece.endswith("\\") and "\\u" not in piece[-5:], f"a piece is {event.arguments!r}"

    def test_an_answer_cut_by_its_length_has_what_came_of_its_call(self) -> None:
        for form in self.forms():
            text, whole = written(form, CALLS[0]), json.dumps(CALLS[0][0][1])
            for place in range(len(text)):
                found = Gathered(self.make(), [text[:place]], cut=True)
                assert not found.broken and len(found.names) <= 1
                assert all(whole.replace(" ", "").startswith(given.replace(" ", "")) for given in found.arguments)

    def test_nothing_a_model_writes_raises_or_is_lost(self) -> None:
        dice = random.Random(2)
        for form in self.forms():
            for _ in range(200):
                text = list(written(form, dice.choice(CALLS)[: form.most]))
                for _ in range(dice.randint(1, 4)):
                    place = dice.randrange(len(text))
                    text[place] = dice.choice(["", "{", "}", '"', "\\", "<", "x", "\n", text[place] * 2])
                one = Gathered(self.make(), ["".join(text)])
                assert one.said == Gathered(self.make(), text).said, (
                    f"{''.join(text)!r} is read in another way in pieces"
                )
                good = [given for place, given in enumerate(one.arguments) if place not in one.broken]
                assert all(isinstance(json.loads(given), dict) for given in good), f"{''.join(text)!r}: {good}"
                assert one.text or one.names or not "".join(text).strip(), f"nothing is left of {''.join(text)!r}"

    def test_two_answers_share_nothing(self) -> None:
        for form in self.forms():
            parser = self.make()
            text, first, second = written(form, CALLS[0]), parser.start(TOOLS), parser.start(TOOLS)
            for char in text:
                first.feed(char, ())
            events = [*second.feed(PROSE, ()), *second.finish(False)]
            assert "".join(event for event in events if isinstance(event, str)) == PROSE

    def test_it_does_not_fit_a_template_that_says_nothing_of_tools(self) -> None:
        assert self.make().fits("{% for m in messages %}{{ m.content }}{% endfor %}") is False

    def test_it_fits_its_templates(self) -> None:
        assert all(self.make().fits(template) for template in self.templates if template)


class ReasoningParserContract:
    """What every reasoning parser keeps. `answers`: (prompt, what the model writes, its reasoning, its content)."""

    make: Callable[[], Any]
    templates: Sequence[str] = ("",)
    answers: Sequence[tuple[str, str, str, str]] = ()

    def test_what_it_gives_does_not_depend_on_how_the_text_is_cut(self) -> None:
        for prompt, text, reasoning, content in (*self.answers, ("Hello", PROSE, "", "")):
            whole = _parted(self.make().start(prompt, ""), [text])
            if text is not PROSE:
                assert whole == (reasoning, content), f"{text!r} became {whole}"
            for pieces in cuts(text, random.Random(3)):
                assert _parted(self.make().start(prompt, ""), pieces) == whole, f"{pieces} is read in another way"

    def test_nothing_a_model_writes_raises(self) -> None:
        dice = random.Random(4)
        words = [*self.make().markers, self.make().end, PROSE, "\n", " ", "x"]
        for _ in range(200):
            text = "".join(dice.choices(words, k=5))
            whole = _parted(self.make().start("Hello", ""), [text])
            assert _parted(self.make().start("Hello", ""), list(text)) == whole, (
                f"{text!r} is read in another way in pieces"
            )

    def test_behind_its_end_the_reasoning_is_over(self) -> None:
        stream = self.make().start("Hello", "")
        stream.feed(f"Hm. {self.make().end}", ())
        assert not stream.thinking

    def test_it_does_not_fit_a_template_that_says_nothing_of_reasoning(self) -> None:
        assert self.make().fits("{% for m in messages %}{{ m.content }}{% endfor %}") is False

    def test_it_fits_its_templates(self) -> None:
        assert all(self.make().fits(template) for template in self.templates if template)


def _parted(stream: Any, pieces: Sequence[str]) -> tuple[str, str]:
    """(reasoning, content)"""
    events = [*(event for piece in pieces for event in stream.feed(piece, ())), *stream.finish()]
    assert all(event.text if isinstance(event, Thought) else event for event in events), f"an empty piece: {events}"
    reasoning = "".join(event.text for event in events if isinstance(event, Thought))
    return reasoning, "".join(event for event in events if isinstance(event, str))
