"""What every format is read with: text that arrives in pieces, and a generator that yields where it needs more.

A format is a generator function over a `Source`: it takes what its calls consist of, opens calls and gives their
arguments. `Reading` runs it, keeps the text around calls, and turns a call that breaks into text again.

    text ─▶ content ─ marker ─▶ format: take, open, arguments … ─▶ content ─ marker ─▶ …
                                  └ Broken ─▶ BrokenCall, and on as content
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from turnout.core.parsers import BrokenCall, CallDelta, Tool, overlap
from turnout.plugins.tool_parser.json_value import JsonValue, NotJson

T = TypeVar("T")
Reads = Generator[None, None, T]  # yields where more text is needed
Event = str | CallDelta | BrokenCall
Format = Callable[["Source", str], Reads[None]]  # reads what follows the marker it is given


class Broken(Exception):
    """What was read is no call."""


class Other(Exception):
    """What was read is something else, which the format has as well."""


class Ended(Exception):
    """More was needed, and nothing comes any more."""


class Source:
    """The text of one answer, and what was made of it."""

    def __init__(self) -> None:
        self.text = ""  # not read yet
        self.ended = False
        self.events: list[Event] = []
        self.num_calls = 0
        self.begun = False  # a call is being read
        self.open = False  # it has been announced
        self._raw: list[str] = []  # what was read since the call began

    # -- reading

    def need(self, size: int) -> Reads[None]:
        """Wait until so many characters are there. Raises Ended."""
        while len(self.text) < size:
            if self.ended:
                raise Ended
            yield

    def peek(self) -> Reads[str]:
        """The next character, which stays."""
        yield from self.need(1)
        return self.text[0]

    def take(self, literal: str) -> Reads[None]:
        """Raises Broken when something else is there."""
        while len(self.text) < len(literal) and literal.startswith(self.text):
            yield from self.need(len(self.text) + 1)
        if not self.text.startswith(literal):
            raise Broken
        self._read(len(literal))

    def maybe(self, literal: str) -> Reads[bool]:
        """Take it if it is there. Raises Ended inside it."""
        while len(self.text) < len(literal) and literal.startswith(self.text) and not self.ended:
            yield
        if self.text and len(self.text) < len(literal) and literal.startswith(self.text):
            raise Ended
        found = self.text.startswith(literal)
        if found:
            self._read(len(literal))
        return found

    def close(self, literal: str) -> Reads[bool]:
        """Pass over white space, then take what closes a call that is whole, if it is there, or its beginning where the
        answer ends in it."""
        yield from self.space()
        try:
            return (yield from self.maybe(literal))
        except Ended:
            self._read(len(self.text))
            return True

    def space(self) -> Reads[None]:
        """Pass over white space, if there is any; the end of the text is no fault here."""
        while True:
            self._read(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return
            yield

    def before(self, *markers: str, most: int = 1 << 20) -> Reads[tuple[str, str]]:
        """The text before the first of the markers, which stays, and the marker. Raises Broken beyond `most`."""
        while (found := first_of(self.text, markers)) is None:
            if len(self.text) > most:
                raise Broken
            yield from self.need(len(self.text) + 1)
        place, marker = found
        return self._read(place), marker

    def until(self, *markers: str, most: int = 1 << 20) -> Reads[tuple[str, str]]:
        """As `before`, and the marker is taken."""
        text, marker = yield from self.before(*markers, most=most)
        self._read(len(marker))
        return text, marker

    def pass_until(self, give: Callable[[str], None], *markers: str) -> Reads[str]:
        """As `until`, but what can't be part of a marker is given away as it comes."""
        while True:
            found = first_of(self.text, markers)
            if found is not None:
                give(self._read(found[0]))
                self._read(len(found[1]))
                return found[1]
            give(self._read(len(self.text) - overlap(self.text, markers)))
            yield from self.need(len(self.text) + 1)

    def json(self, give: Callable[[str], None] | None = None) -> Reads[str]:
        """One JSON value, given away as it comes, or returned whole. Raises Broken."""
        value, pieces = JsonValue(), []
        while True:
            try:
                size, piece = value.feed(self.text)
            except NotJson as wrong:
                self._read(wrong.args[0])
                if give is not None and wrong.args[1]:
                    give(wrong.args[1])
                raise Broken from None
            self._read(size)
            if piece and give is not None:
                give(piece)
            elif piece:
                pieces.append(piece)
            if value.done or (not self.text and self.ended and value.finish()):
                return "".join(pieces)
            yield from self.need(len(self.text) + 1)

    def json_object(self) -> Reads[None]:
        """A JSON object, which is the call's arguments. Raises Broken."""
        if (yield from self.peek()) != "{":
            raise Broken
        yield from self.json(self.arguments)

    def value(self) -> Reads[Any]:
        """One JSON value as an object. Raises Broken."""
        text = yield from self.json()
        try:
            return json.loads(text)
        except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
            raise Broken from None

    def _read(self, size: int) -> str:
        text, self.text = self.text[:size], self.text[size:]
        self._raw.append(text)
        return text

    # -- making calls

    def begin(self, raw: str = "") -> None:
        """A call begins here; `raw` is what was read of it. If it breaks, what follows becomes text again."""
        self.begun, self.open, self._raw = True, False, [raw]

    def announce(self, name: str, id: str | None = None) -> None:
        """The call has a name. Raises Broken for one that can't be."""
        if not name or len(name) > 256 or any(char.isspace() for char in name):
            raise Broken
        assert not self.open
        self.open = True
        self.events.append(CallDelta(self.num_calls, name, "", id))

    def arguments(self, piece: str) -> None:
        """The next piece of the call's arguments."""
        if piece:
            self.events.append(CallDelta(self.num_calls, None, piece))

    def done(self) -> None:
        """The call is whole."""
        assert self.open
        self.begun = self.open = False
        self.num_calls += 1
        self._raw = []

    def call(self, name: str, arguments: str, id: str | None = None) -> None:
        """A whole call at once."""
        self.announce(name, id)
        self.arguments(arguments)
        self.done()

    def fail(self, counts: bool) -> None:
        """What was read since `begin`, or behind a call, is text after all. `counts`: a call was tried."""
        broken = self.begun and counts
        self.events.append(BrokenCall(self.num_calls if self.open else None, self.raw) if broken else self.raw)
        self.num_calls += self.open
        self.begun, self.open, self._raw = False, False, []

    @property
    def raw(self) -> str:
        return "".join(self._raw)


class Reading:
    """The stream of a format. Its calls begin at one of `markers`, and where the answer begins with a character of
    `opening`. White space around calls is the format's, unless content stands on both sides."""

    def __init__(self, markers: Sequence[str], format: Format, opening: str = "") -> None:
        self._source, self._markers, self._format, self._opening = Source(), tuple(markers), format, opening
        self._cut = self._over = False
        self._gap: str | None = None  # white space before the last call; None: content goes on
        self._said = False  # there was content
        self._steps = self._run()

    def feed(self, text: str, tokens: Sequence[int] = ()) -> list[Event]:
        self._source.text += text
        return self._advance()

    def finish(self, cut: bool) -> list[Event]:
        self._source.ended, self._cut = True, cut
        return self._advance()

    def _advance(self) -> list[Event]:
        if not self._over:
            self._over = next(self._steps, self) is self
        events, self._source.events = self._source.events, []
        return merged(events)

    def _run(self) -> Reads[None]:
        source = self._source
        if self._opening:
            yield from source.space()
            if source.text[:1] and source.text[0] in self._opening:
                source.begin(source.raw)
                yield from self._call("")
            else:
                self._say(source.raw)
        while not self._over:
            marker = yield from self._content()
            if marker is None:
                return
            yield from self._call(marker)

    def _call(self, marker: str) -> Reads[None]:
        """One or several calls. What only looked like one, having no marker, is text like other text."""
        source = self._source
        try:
            yield from self._format(source, marker)
        except (Broken, Other) as fault:
            self._gap, self._said = None, True
            source.fail(counts=isinstance(fault, Broken) and (source.open or bool(marker)))
        except Ended:
            self._unfinished(marked=bool(marker))
            self._over = True

    def _unfinished(self, *, marked: bool) -> None:
        """The answer ends inside a call, or behind one."""
        source, left = self._source, self._source.text
        if not source.begun:
            source.events.append((source.raw + left).strip())
        elif not (self._cut and source.open):
            source.fail(counts=not self._cut and (source.open or marked))
            source.events.append(left)

    def _content(self) -> Reads[str | None]:
        """Pass content on up to a marker. None: the answer ended."""
        source = self._source
        while True:
            found = first_of(source.text, self._markers)
            if found is not None:
                place, marker = found
                self._say(source.text[:place].rstrip())
                gap = source.text[len(source.text[:place].rstrip()) : place]
                self._gap = gap if self._gap is None else self._gap
                source.begin(gap + marker)
                source.text = source.text[place + len(marker) :]
                return marker
            if source.ended:
                self._say(source.text if self._gap is None else source.text.rstrip())
                return None
            sure = source.text[: len(source.text) - overlap(source.text, self._markers)].rstrip()
            self._say(sure)
            source.text = source.text[len(sure) :]
            yield

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._gap is not None:
            rest = text.lstrip()
            text = (text[: len(text) - len(rest)] or self._gap) + rest if self._said else rest
        self._gap, self._said = None, True
        self._source.events.append(text)


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the markers begins, and which; of two at one place the longer."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    found = [item for item in found if item[0] >= 0]
    if not found:
        return None
    place, _, marker = min(found)
    return place, marker


def merged(events: Sequence[Event]) -> list[Event]:
    """Neighbouring pieces of one text or of one call's arguments as one piece."""
    made: list[Event] = []
    for event in events:
        last = made[-1] if made else None
        if event == "":
            continue
        if isinstance(event, str) and isinstance(last, str):
            made[-1] = last + event
        elif isinstance(event, CallDelta) and event.name is None and isinstance(last, CallDelta) and last.name is None:
            made[-1] = CallDelta(event.index, None, last.arguments + event.arguments)
        else:
            made.append(event)
    return made


def json_call(source: Source, *, known: frozenset[str] | None = None, id: str | None = None) -> Reads[None]:
    """One call as an object with its name and its arguments, in any order. `known`: names that are calls at all; `id`:
    where the object has none."""
    name, arguments = None, None
    yield from source.take("{")
    yield from source.space()
    while not (yield from source.maybe("}")):
        key = yield from source.value()
        yield from source.space()
        yield from source.take(":")
        yield from source.space()
        if key == "name":
            name = yield from source.value()
            if not isinstance(name, str) or (known is not None and name not in known):
                raise Broken
        elif key in ("arguments", "parameters"):
            if name is not None and (yield from source.peek()) == "{":
                source.announce(name, id)
                yield from source.json(source.arguments)
            else:
                arguments = _object((yield from source.value()))
        else:
            other = yield from source.value()
            id = other if key == "id" and isinstance(other, str) else id
        yield from source.space()
        if not (yield from source.maybe(",")):
            yield from source.take("}")
            break
        yield from source.space()
    if not source.open:
        if name is None:
            raise Broken
        source.announce(name, id)
        source.arguments(arguments or "{}")
    source.done()


def _object(value: object) -> str:
    """Arguments that came before the name, as text, or not at all. Raises Broken for what is no object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Broken from None
    if value is not None and not isinstance(value, dict):
        raise Broken
    return json.dumps(value or {}, ensure_ascii=False)


def json_calls(
    source: Source,
    *,
    known: frozenset[str] | None = None,
    make_id: Callable[[], str | None] = lambda: None,
    listed: bool = False,
) -> Reads[None]:
    """A list of such objects, or one alone. `listed`: the bracket that opens the list was read."""
    if not (listed or (yield from source.maybe("["))):
        yield from json_call(source, known=known, id=make_id())
        return
    yield from source.space()
    while not (yield from source.maybe("]")):
        source.begin(source.raw)
        yield from json_call(source, known=known, id=make_id())
        yield from source.space()
        if not (yield from source.maybe(",")):
            yield from source.take("]")
            return
        yield from source.space()


def names_of(tools: Sequence[Tool]) -> frozenset[str]:
    """The functions that may be called."""
    return frozenset(tool["function"]["name"] for tool in tools)
