"""What the engine puts out for one choice, as text: tokens, log-probabilities and the end of each output become a `Delta`.

The token that ends a choice, an end token or one of stop_token_ids, counts as generated and has its log-probability,
but is no part of the text. A stop string ends a choice as soon as the text holds it: tokens up to there count, and whoever
reads must tell the engine. It knows no request and no HTTP.
"""

from __future__ import annotations

from typing import NamedTuple

from turnout.core.types import Finish, Logprobs, Output
from turnout.server.text.detokenizer import Detokenizer
from turnout.server.text.stop import StopStrings
from turnout.server.text.tokenizer import Text

TAIL = 16  # last tokens of a prompt, enough to tell how the text goes on


class Prompt(NamedTuple):
    """A prompt as ids and, for echo, as the text the client sent."""

    ids: list[int]
    text: str = ""
    continues: bool = True  # the answer goes on in the prompt's text; False: it begins a text of its own


class TextOptions(NamedTuple):
    """How tokens are shown, and what ends the text beside the engine's own limits. One for all choices of a request."""

    stop: StopStrings = StopStrings()
    end_ids: frozenset[int] = frozenset()  # the model's own, of which no stop_reason is told
    include_stop: bool = False  # what ended the text is shown
    skip_special_tokens: bool = True
    shown: frozenset[int] = frozenset()  # special tokens that are not skipped, since a parser reads them
    min_tokens: int = 0  # a stop string completed by one of the first so many is ordinary text


class Delta(NamedTuple):
    """What one output of the engine adds to a choice."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish: str | None = None  # stop or length
    stop_reason: str | int | None = None  # the stop string or the id of stop_token_ids that ended it


class OutputText:
    """One choice on its way."""

    def __init__(self, text: Text, prompt: Prompt, options: TextOptions) -> None:
        self.num_tokens = self.num_cached = 0
        self.finish: str | None = None
        self._options = options
        self.logprob = 0.0  # of all tokens, where log-probabilities were asked for
        self._detokenizer = Detokenizer(
            text,
            prompt_tail=prompt.ids[-TAIL:] if prompt.continues else (),
            skip_special_tokens=options.skip_special_tokens,
            shown=options.shown,
            stop=options.stop,
            include_stop=options.include_stop,
            min_tokens=options.min_tokens,
        )

    def push(self, output: Output) -> Delta:
        """The next output, in order. One that ended as ERROR or ABORT has no text: the caller looks first."""
        self.num_cached = output.num_cached
        tokens, logprobs = output.tokens, output.logprobs
        shown, finish = tokens, output.finish.value if output.finish else None
        if output.finish is Finish.COMPLETE:
            finish = Finish.STOP.value  # as clients know it
        stop_reason: str | int | None = None
        if output.finish is Finish.STOP:
            stop_reason = None if tokens[-1] in self._options.end_ids else tokens[-1]
            shown = tokens if self._options.include_stop else tokens[:-1]
        detokenizer, before = self._detokenizer, self.num_tokens
        self.num_tokens += len(tokens)
        text = detokenizer.push(shown) if shown else ""
        if finish and detokenizer.stopped is None:
            text += detokenizer.finish()
        if detokenizer.stopped is not None:
            finish, stop_reason = "stop", detokenizer.stopped
            self.num_tokens = detokenizer.num_tokens_used
            tokens = tokens[: self.num_tokens - before]
            logprobs = logprobs[: self.num_tokens - before]
        if logprobs:
            self.logprob += sum(entry.logprob for entry in logprobs)
        self.finish = finish
        return Delta(text, tokens, logprobs, output.prompt_logprobs, finish, stop_reason)

    @property
    def mean_logprob(self) -> float:
        return self.logprob / self.num_tokens if self.num_tokens else 0.0


class Collected:
    """All deltas of a choice, together."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self._pieces.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish, self.stop_reason = delta.finish, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self._pieces)
