"""Several answers to one prompt: the requests that make them. It knows no text and no HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnout.core.types import Request, Sampling


def several(
    name: str,
    prompt: list[int],
    sampling: Sampling,
    num: int,
    *,
    first: int = 0,
    ranked: bool = False,
    priority: int = 0,
    labels: Mapping[str, str] | None = None,
    salt: str | None = None,
) -> list[Request]:
    """Requests `name-first`, `name-(first + 1)`, … for `num` answers.

    The first computes and scores the prompt, the others are its children: they begin when it has, and share its blocks.
    With a seed each has its own, seed + place. `ranked`: with the log-probabilities that tell which answers are best.
    """
    return [
        Request(
            f"{name}-{first + place}",
            list(prompt),
            _sampling(sampling, place, ranked=ranked),
            priority=priority,
            labels=labels or {},
            salt=salt,
            parent=f"{name}-{first}" if place else None,
        )
        for place in range(num)
    ]


def _sampling(sampling: Sampling, place: int, *, ranked: bool) -> Sampling:
    if ranked and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    if place == 0:
        return sampling
    seed = None if sampling.seed is None else sampling.seed + place
    if seed is not None and seed >= 2**64:
        seed -= 2**64
    return replace(sampling, seed=seed, prompt_logprobs=None)
