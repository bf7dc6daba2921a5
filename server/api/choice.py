"""One answer of an HTTP request on its way: outputs of the engine become deltas, failures become errors.

Text, log-probabilities, stop strings and the end are `text/output.py`'s; here is what belongs to the request.
"""

from __future__ import annotations

from turnout.core.types import Finish, Output
from turnout.server.api.errors import ApiError, bad_request, unavailable
from turnout.server.api.sampling import end_ids
from turnout.server.api.schema import Generation
from turnout.server.text.output import Delta, OutputText, Prompt, TextOptions
from turnout.server.text.stop import StopStrings
from turnout.server.text.tokenizer import Text


def text_options(body: Generation, text: Text, shown: frozenset[int]) -> TextOptions:
    """How all choices of a request are shown and ended."""
    return TextOptions(
        stop=StopStrings(body.stop),
        end_ids=end_ids(body, text),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        shown=shown,
        min_tokens=body.min_tokens,
    )


class Choice:
    """`id` is the engine request's. `leader` is the index of its prompt's first choice. `form`: the field that says what
    form the answer must have."""

    def __init__(
        self, index: int, leader: int, id: str, prompt: Prompt, text: OutputText, form: str | None = None
    ) -> None:
        self.index, self.leader, self.id, self.prompt = index, leader, id, prompt
        self._text, self._form = text, form

    def push(self, output: Output) -> Delta:
        """Raises ApiError when the engine gave the request up."""
        if output.finish is Finish.ERROR:
            raise ApiError(500, f"the engine failed on this request: {output.error}", code="engine_error")
        if output.finish is Finish.REFUSED:
            raise bad_request(f"the form of the answer can't be served: {output.error}", self._form)
        if output.finish is Finish.ABORT:
            raise unavailable("the engine ended this request")
        return self._text.push(output)

    @property
    def finish(self) -> str | None:
        return self._text.finish

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def num_cached(self) -> int:
        return self._text.num_cached

    @property
    def mean_logprob(self) -> float:
        return self._text.mean_logprob
