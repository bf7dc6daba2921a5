"""Fields that come in several forms: each becomes one form, or a ValueError says what it may be. It knows no request."""

from __future__ import annotations

from turnout.server.api.errors import show

MAX_STOPS = 64  # stop strings; the OpenAI API says 4, but tools send more
MAX_STOP_LENGTH = 2048  # characters of all of them: each token's text is compared with them
MAX_PROMPTS = 2048  # in one request

Prompt = str | list[int]


def prompts(value: object) -> list[Prompt]:
    """The four forms of a prompt as a list of prompts: a text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a text, texts, token ids or lists of token ids, got {show(value)}")
    if all(type(item) is int for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"may hold {MAX_PROMPTS} prompts, got {len(value)}: send several requests")
    texts = all(isinstance(item, str) for item in value)
    if texts or all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
        return list(value)
    raise ValueError("must hold texts only, token ids only, or lists of token ids only")


def stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"must be a text or a list of texts, got {show(value)}")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"may hold {MAX_STOPS} texts, got {len(stops)}")
    if sum(map(len, stops)) > MAX_STOP_LENGTH:
        raise ValueError(f"may hold {MAX_STOP_LENGTH} characters in all, got {sum(map(len, stops))}")
    if "" in stops:
        raise ValueError("must not hold an empty text: every answer would end at once")
    return stops


def biases(value: object) -> object:
    """Keys become ints; what they and their values may be is checked where the vocabulary is known."""
    if not (isinstance(value, dict) and value):
        raise ValueError(f"must be an object of token ids and biases, got {show(value)}")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < 20):
            raise ValueError(f"keys must be token ids, got {show(key)}")
        biases[int(key)] = bias
    return biases


def early(value: object) -> object:
    if not (isinstance(value, bool) or value == "never"):
        raise ValueError(f'must be true, false or "never", got {show(value)}')
    return value
