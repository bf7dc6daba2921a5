"""From a request's fields to the core's Sampling.

What holds where the request says nothing is in `defaults.py`. The limit on new tokens: what the request says; else 16 for
a completion and the rest of the context for a chat.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnout.core.types import EngineInfo, Sampling, Whitespace
from turnout.server.api.defaults import Values, sampling_with
from turnout.server.api.errors import ApiError, bad_request, show
from turnout.server.api.schema import Generation
from turnout.server.api.structured import form_of
from turnout.server.text.tokenizer import Text

COMPLETION_TOKENS = 16


def max_tokens_of(wanted: int | None, default: int | None, num_prompt: int, info: EngineInfo) -> int:
    """The limit on new tokens; `default` None: the rest of the context. Raises ApiError when it does not fit."""
    longest = min(info.max_model_len, info.capacity + 1)  # the last token is never fed back: it needs no slot
    rest = longest - num_prompt
    if wanted is None and rest > 0:
        return rest if default is None else min(default, rest)
    new = wanted if wanted is not None else 1
    if new > rest or num_prompt > info.capacity:
        cache = f", and the server's cache holds {info.capacity}" if info.capacity < info.max_model_len else ""
        raise bad_request(
            f"the context length is {info.max_model_len} tokens{cache}, but {num_prompt + new} were asked for: "
            f"{num_prompt} in the prompt and {'at least ' if wanted is None else ''}{new} in the answer; "
            f"shorten the prompt or lower max_tokens",
            "max_tokens" if num_prompt < longest else "prompt",
            "context_length_exceeded",
        )
    return new


def sampling_of(
    body: Generation,
    defaults: Values,
    text: Text,
    info: EngineInfo,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    whitespace: Whitespace = "compact",
) -> Sampling:
    """What the request asks for. Raises ApiError naming the field that is wrong."""
    num_ids = min(info.vocab_size, text.vocab_size)  # a model may have rows for ids that mean nothing
    check_ids(body.stop_token_ids, num_ids, "stop_token_ids")
    check_ids(body.logit_bias, num_ids, "logit_bias")
    form = form_of(body, whitespace)
    try:
        return sampling_with(
            body,
            defaults,
            end_ids(body, text),
            info,
            stop_ids=body.stop_token_ids,
            logit_bias=body.logit_bias,
            seed=body.seed,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured=form,
        )
    except ValueError as error:
        raise invalid_sampling(error) from None


def end_ids(body: Generation, text: Text) -> frozenset[int]:
    """The model's own end tokens, all of them, unless the client wants to go on beyond."""
    return frozenset() if body.ignore_eos else frozenset(text.eos_ids)


def invalid_sampling(error: ValueError) -> ApiError:
    """The core names the field first in its message."""
    name = str(error).split(" ", 1)[0]
    return bad_request(str(error), name if name in Generation.model_fields else None)


def check_ids(ids: Iterable[int], num_ids: int, param: str) -> None:
    """Raise ApiError for a token id that there is none of."""
    for token in ids:
        if not 0 <= token < num_ids:
            raise bad_request(f"{param} holds {show(token)}, but token ids go from 0 to {num_ids - 1}", param)
