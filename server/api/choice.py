"""One answer of an HTTP request on its way: outputs of the engine become text, token by token.

The token that ends a choice, an end token or one of stop_token_ids, counts as generated and has its log-probability,
but is no part of the text. A stop string ends a choice as soon as the text holds it: tokens up to there count, the engine
is told to stop.
"""

from __future__ import annotations

from typing import NamedTuple

from turnout.core.types import Finish, Logprobs, Output, Request
from turnout.server.api.errors import ApiError, unavailable
from turnout.server.api.sampling import end_ids
from turnout.server.api.schema import Generation
from turnout.server.text.tokenizer import Detokenizer, Text

TAIL = 16  # last tokens of a prompt, enough to tell how the text goes on


class Prompt(NamedTuple):
    """A prompt as ids and, for echo, as the text the client sent."""

    ids: list[int]
    text: str = ""
    continues: bool = True  # the answer goes on in the prompt's text; False: it begins a text of its own


class Delta(NamedTuple):
    """What one output of the engine adds to a choice."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish: str | None = None  # stop or length
    stop_reason: str | int | None = None  # the stop string or the id of stop_token_ids that ended it


class Choice:
    """One answer on its way. `leader` is the index of its prompt's first choice."""

    def __init__(self, index: int, leader: int, prompt: Prompt, request: Request, body: Generation, text: Text) -> None:
        self.index, self.leader, self.prompt, self.request = index, leader, prompt, request
        self.num_tokens = self.num_cached = 0
        self.finish: str | None = None
        self._logprob = 0.0  # of all tokens, where log-probabilities were asked for
        self._end_ids, self._shows_end = end_ids(body, text), body.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            text,
            prompt_tail=prompt.ids[-TAIL:] if prompt.continues else (),
            skip_special_tokens=body.skip_special_tokens,
            stop=body.stop,
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
        )

    def push(self, output: Output) -> Delta:
        """Raises ApiError when the engine gave the request up."""
        if output.finish is Finish.ERROR:
            raise ApiError(500, f"the engine failed on this request: {output.error}", code="engine_error")
        if output.finish is Finish.ABORT:
            raise unavailable("the engine ended this request")
        self.num_cached = output.num_cached
        tokens, logprobs = output.tokens, output.logprobs
        shown, finish = tokens, output.finish.value if output.finish else None
        stop_reason: str | int | None = None
        if output.finish is Finish.STOP:
            stop_reason = None if tokens[-1] in self._end_ids else tokens[-1]
            shown = tokens if self._shows_end else tokens[:-1]
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
            self._logprob += sum(mark.logprob for mark in logprobs)
        self.finish = finish
        return Delta(text, tokens, logprobs, output.prompt_logprobs, finish, stop_reason)

    @property
    def mean_logprob(self) -> float:
        return self._logprob / self.num_tokens if self.num_tokens else 0.0
