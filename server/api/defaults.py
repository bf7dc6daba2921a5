"""The sampling values that hold where nobody asks for others, by one rule for the server and the terminal.

The rule: what was asked for, an explicit 0 included; else what the model's generation_config.json says, unless that was
switched off; else OpenAI's: temperature 1, top_p 1, no other filter, no penalty. It knows no request and no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from turnout.core.types import EngineInfo, Sampling
from turnout.server.text.tokenizer import Text

DEFAULTED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
SMALLEST_TOP_P = 1e-9  # what top_p 0 means: the likeliest token alone

Values = Mapping[str, Any]  # by name of the field

log = logging.getLogger("turnout.server")


def defaults_of(text: Text, option: str, choice: str) -> Values:
    """The values of DEFAULTED that hold by default; `option` is the one that says `choice`, auto or none.

    Raises ValueError when the model's own cannot be used.
    """
    own = usual(text.generation_defaults) if choice == "auto" else {}
    try:
        for name, value in own.items():
            whole = name == "top_k"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}")  # noqa: TRY004
        sampling = Sampling(**own)
    except ValueError as error:
        raise ValueError(
            f"the model's generation_config.json cannot be used: {error}; mend it or set {option}=none"
        ) from None
    values: Values = {name: getattr(sampling, name) for name in DEFAULTED}
    log.info("sampling defaults: %s", ", ".join(f"{name} {value:g}" for name, value in values.items()))
    return values


def sampling_with(
    given: object,
    defaults: Values,
    end_ids: frozenset[int],
    info: EngineInfo,
    *,
    stop_ids: Iterable[int] = (),
    **rest: Any,
) -> Sampling:
    """What was asked for, else what holds by default. `given` has a field for each of DEFAULTED, None where nobody asked;
    `rest` are Sampling's other fields. Raises ValueError that begins with the field's name."""
    asked = {name: value for name in DEFAULTED if (value := getattr(given, name)) is not None}
    stops = frozenset(stop_ids) | {i for i in end_ids if i < info.vocab_size}
    return Sampling(**{**defaults, **usual(asked)}, stop_ids=stops, **rest)


def usual(values: Values) -> dict[str, Any]:
    """The same with top_p 0 and top_k -1 as Sampling spells what they mean: the likeliest token alone, and all."""
    read = dict(values)
    if read.get("top_p") == 0:
        read["top_p"] = SMALLEST_TOP_P
    if read.get("top_k") == -1:
        read["top_k"] = 0
    return read
